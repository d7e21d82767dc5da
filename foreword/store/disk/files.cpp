// Writes many files in one call, without Python's interpreter lock (files.py). Each call for a file would give the lock away
// and take it again, and a thread that computes in Python would wait as often.
#include <cerrno>
#include <cstdint>
#include <ctime>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

namespace {

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

// The folder of a path, and those that it is in, with mode 0700.
bool make_folder_of(const std::string& path) {
    const std::string folder = path.substr(0, path.rfind('/'));
    if (folder.empty() || folder == path) return false;
    if (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return true;
    return errno == ENOENT && make_folder_of(folder) && (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST);
}

// A new file, never through a link in its place.
int create(const char* path) {
    constexpr int how = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW;
    const int file = open(path, how, 0600);
    return file < 0 && errno == ENOENT && make_folder_of(path) ? open(path, how, 0600) : file;
}

bool write_all(int file, const char* data, int64_t length) {
    while (length > 0) {
        const ssize_t written = write(file, data, length);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        data += written;
        length -= written;
    }
    return true;
}

bool write_file(const char* temporary, const char* path, const char* data, int64_t length) {
    const int file = create(temporary);
    if (file < 0) return false;
    const bool written = write_all(file, data, length);
    if (close(file) == 0 && written && rename(temporary, path) == 0) return true;
    unlink(temporary);
    return false;
}

}  // namespace

// Writes files under their temporary names and renames them, in order. Returns how many: the next one failed, or `seconds` have
// passed. Nothing is left of a file that failed.
extern "C" int64_t fw_write_files(int64_t count, const char* const* temporaries, const char* const* paths,
                                  const char* const* data, const int64_t* lengths, double seconds) {
    const double until = now() + seconds;
    for (int64_t i = 0; i < count; i++)
        if (now() >= until || !write_file(temporaries[i], paths[i], data[i], lengths[i])) return i;
    return count;
}
