"""State diagrams of the transfer protocol, drawn from its table. As a script it prints them for dev/concepts/transfer.md."""

from collections.abc import Iterator

from foreword.transfer.protocol import FIRST, TABLE, Role, State


def diagram(role: Role) -> str:
    """The table of one role as a Mermaid state diagram."""
    return "\n".join(["stateDiagram-v2", f"    [*] --> {FIRST[role]}", *_arrows(role), "    ended --> [*]"])


def _arrows(role: Role) -> Iterator[str]:
    """Draws one arrow per pair of states, labeled with all events that cause this transition."""
    labels: dict[tuple[State, State], list[str]] = {}
    for (state, event), transition in TABLE[role].items():
        done = ", ".join(action for action in transition.actions if action.startswith(("send", "remember")))
        how = f" → {done}" if done else ""
        labels.setdefault((state, transition.state), []).append(f"{event}{how}")
    for (before, after), events in labels.items():
        yield f"    {before} --> {after}: {'<br/>'.join(events)}"


if __name__ == "__main__":
    for one in Role:
        print(f"### {one}\n\n```mermaid\n{diagram(one)}\n```\n")
