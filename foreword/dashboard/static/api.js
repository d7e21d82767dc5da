// Requests to this server, with the caller's key where one is needed.

const KEPT = "foreword-api-key";

export class Refused extends Error {}
export class Closed extends Error {}
export class Failed extends Error {}

export const refused = () => new Refused(sessionStorage.getItem(KEPT) ? "That key is not one that this server knows." : "");

export async function get(path, signal) {
  const key = sessionStorage.getItem(KEPT);
  let answer;
  try {
    answer = await fetch(path, { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store", signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failed("The server does not answer.");
  }
  if (answer.status === 401 || answer.status === 403) throw refused();
  if (!answer.ok) throw new Failed(`The server answered ${answer.status}.`);
  return answer;
}

export const getJson = async (path, signal) => (await get(path, signal)).json();

// Asks for a key and keeps it in this tab; resolves when one was given.
export function askForKey(why) {
  const dialog = document.getElementById("ask");
  const field = document.getElementById("ask-key");
  if (why) document.getElementById("ask-why").textContent = why;
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    document.getElementById("ask-form").onsubmit = (event) => {
      event.preventDefault();
      // A header takes no other characters, and no key has them.
      const key = field.value.trim();
      if (!/^[!-~]+$/.test(key)) {
        document.getElementById("ask-why").textContent = "A key has letters, digits and signs, without spaces.";
        return;
      }
      sessionStorage.setItem(KEPT, key);
      field.value = "";
      dialog.close();
      resolve();
    };
    dialog.oncancel = (event) => event.preventDefault();
  });
}
