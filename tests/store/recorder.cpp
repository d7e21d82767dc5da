// Preloaded into a process: writes down every change that it makes below the folder $FW_RECORDED, in order, to the file
// $FW_RECORD. One change at a time is made and written down, so the record is the order in which the system saw them.
//
//     kind 1, inode 8, offset 8, bytes 8, lengths of two paths 4 and 4, the paths, the data
//
// Memory that is mapped is not seen: SQLite's "-shm" file alone, which means nothing after a loss of power.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <cerrno>
#include <fcntl.h>
#include <pthread.h>
#include <string>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;

struct Lock {
    Lock() { pthread_mutex_lock(&mutex_); }
    ~Lock() { pthread_mutex_unlock(&mutex_); }
};

template <class Call>
Call real(const char* name) {
    return reinterpret_cast<Call>(dlsym(RTLD_NEXT, name));
}

const std::string& root() {
    static const std::string found = getenv("FW_RECORDED") ? getenv("FW_RECORDED") : "";
    return found;
}

int record_file() {
    static const int handle = static_cast<int>(
        syscall(SYS_openat, AT_FDCWD, getenv("FW_RECORD"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    return handle;
}

bool below(const std::string& path) {
    return !root().empty() && path.compare(0, root().size(), root()) == 0 &&
           (path.size() == root().size() || path[root().size()] == '/');
}

std::string of_handle(int handle) {
    char link[64], found[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    const ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, found, sizeof found);
    return size > 0 ? std::string(found, static_cast<size_t>(size)) : std::string();
}

std::string absolute(int folder, const char* path) {
    if (path[0] == '/') return path;
    if (folder != AT_FDCWD) return of_handle(folder) + "/" + path;
    char here[PATH_MAX];
    return getcwd(here, sizeof here) ? std::string(here) + "/" + path : std::string(path);
}

void put(const void* data, size_t size) {
    const char* at = static_cast<const char*>(data);
    while (size) {
        const long done = syscall(SYS_write, record_file(), at, size);
        if (done <= 0) abort();
        at += done;
        size -= static_cast<size_t>(done);
    }
}

void note(char kind, uint64_t inode, int64_t offset, const void* data, uint64_t size, const std::string& path = "",
          const std::string& other = "") {
    const int before = errno;
    const uint32_t first = static_cast<uint32_t>(path.size()), second = static_cast<uint32_t>(other.size());
    std::string head(1, kind);
    head.append(reinterpret_cast<const char*>(&inode), 8).append(reinterpret_cast<const char*>(&offset), 8);
    head.append(reinterpret_cast<const char*>(&size), 8).append(reinterpret_cast<const char*>(&first), 4);
    head.append(reinterpret_cast<const char*>(&second), 4).append(path).append(other);
    put(head.data(), head.size());
    if (data) put(data, size);
    errno = before;
}

// The inode of an open file below the folder, 0 of any other.
uint64_t inode_of(int handle, bool folders = false) {
    const int before = errno;
    struct stat found;
    uint64_t inode = 0;
    if (!root().empty() && !fstat(handle, &found) && (S_ISREG(found.st_mode) || (folders && S_ISDIR(found.st_mode))) &&
        below(of_handle(handle)))
        inode = found.st_ino;
    errno = before;
    return inode;
}

int opened(int folder, const char* path, int flags, mode_t mode) {
    const std::string whole = root().empty() ? "" : absolute(folder, path);
    if (!below(whole) || !(flags & (O_CREAT | O_TRUNC)))
        return static_cast<int>(syscall(SYS_openat, folder, path, flags, mode));
    Lock lock;
    struct stat found;
    const bool there = fstatat(folder, path, &found, AT_SYMLINK_NOFOLLOW) == 0;
    const int handle = static_cast<int>(syscall(SYS_openat, folder, path, flags, mode));
    if (handle >= 0 && !fstat(handle, &found) && S_ISREG(found.st_mode)) {
        if (!there) note('c', found.st_ino, 0, nullptr, 0, whole);
        else if (flags & O_TRUNC) note('t', found.st_ino, 0, nullptr, 0);
    }
    return handle;
}

mode_t mode_in(int flags, va_list more) {
    return flags & (O_CREAT | O_TMPFILE) ? static_cast<mode_t>(va_arg(more, int)) : 0;
}

template <class Call>
ssize_t written(int handle, int64_t offset, const iovec* parts, int count, Call call) {
    const uint64_t inode = inode_of(handle);
    if (!inode) return call();
    Lock lock;
    if (offset < 0) {
        struct stat found;
        const bool appends = fcntl(handle, F_GETFL) & O_APPEND;
        offset = appends && !fstat(handle, &found) ? found.st_size : lseek(handle, 0, SEEK_CUR);
    }
    const ssize_t done = call();
    std::string data;
    for (int i = 0; i < count && done > static_cast<ssize_t>(data.size()); i++)
        data.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
    if (done > 0) note('w', inode, offset, data.data(), static_cast<uint64_t>(done));
    return done;
}

template <class Call>
int changed(char kind, int handle, int64_t offset, uint64_t size, Call call) {
    const uint64_t inode = inode_of(handle);
    if (!inode) return call();
    Lock lock;
    const int result = call();
    if (result == 0) note(kind, inode, offset, nullptr, size);
    return result;
}

template <class Call>
int synced(int handle, Call call) {
    const uint64_t file = inode_of(handle), inode = file ? file : inode_of(handle, true);
    if (!inode) return call();
    Lock lock;
    const int result = call();
    if (result == 0) note('s', inode, 0, nullptr, 0, file ? "" : of_handle(handle));
    return result;
}

template <class Call>
int renamed(char kind, const std::string& path, const std::string& other, Call call) {
    if (!below(path)) return call();
    Lock lock;
    const int result = call();
    if (result == 0) note(kind, 0, 0, nullptr, 0, path, other);
    return result;
}

}  // namespace

extern "C" {

// Something that the process has done, between its changes.
void fw_mark(const char* text) {
    Lock lock;
    note('m', 0, 0, nullptr, 0, text);
}

int open(const char* path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const mode_t mode = mode_in(flags, more);
    va_end(more);
    return opened(AT_FDCWD, path, flags, mode);
}

int open64(const char* path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const mode_t mode = mode_in(flags, more);
    va_end(more);
    return opened(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char* path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const mode_t mode = mode_in(flags, more);
    va_end(more);
    return opened(folder, path, flags, mode);
}

int openat64(int folder, const char* path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const mode_t mode = mode_in(flags, more);
    va_end(more);
    return opened(folder, path, flags, mode);
}

ssize_t write(int handle, const void* data, size_t size) {
    const iovec part{const_cast<void*>(data), size};
    return written(handle, -1, &part, 1, [&] { return syscall(SYS_write, handle, data, size); });
}

ssize_t writev(int handle, const iovec* parts, int count) {
    return written(handle, -1, parts, count, [&] { return syscall(SYS_writev, handle, parts, count); });
}

ssize_t pwrite(int handle, const void* data, size_t size, off_t offset) {
    const iovec part{const_cast<void*>(data), size};
    return written(handle, offset, &part, 1, [&] { return syscall(SYS_pwrite64, handle, data, size, offset); });
}

ssize_t pwrite64(int handle, const void* data, size_t size, off64_t offset) { return pwrite(handle, data, size, offset); }

ssize_t pwritev(int handle, const iovec* parts, int count, off_t offset) {
    return written(handle, offset, parts, count,
                   [&] { return real<ssize_t (*)(int, const iovec*, int, off_t)>("pwritev")(handle, parts, count, offset); });
}

ssize_t pwritev64(int handle, const iovec* parts, int count, off64_t offset) {
    return pwritev(handle, parts, count, offset);
}

int ftruncate(int handle, off_t size) noexcept {
    return changed('t', handle, size, 0, [&] { return static_cast<int>(syscall(SYS_ftruncate, handle, size)); });
}

int ftruncate64(int handle, off64_t size) noexcept { return ftruncate(handle, size); }

int fallocate(int handle, int mode, off_t offset, off_t size) {
    const char kind = mode & 2 ? 'h' : 'a';
    return changed(kind, handle, offset, static_cast<uint64_t>(size),
                   [&] { return static_cast<int>(syscall(SYS_fallocate, handle, mode, offset, size)); });
}

int fallocate64(int handle, int mode, off64_t offset, off64_t size) { return fallocate(handle, mode, offset, size); }

int fsync(int handle) {
    return synced(handle, [&] { return static_cast<int>(syscall(SYS_fsync, handle)); });
}

int fdatasync(int handle) {
    return synced(handle, [&] { return static_cast<int>(syscall(SYS_fdatasync, handle)); });
}

int rename(const char* path, const char* other) noexcept {
    return renamed('r', absolute(AT_FDCWD, path), absolute(AT_FDCWD, other),
                   [&] { return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, path, AT_FDCWD, other, 0)); });
}

int renameat(int folder, const char* path, int other_folder, const char* other) noexcept {
    return renamed('r', absolute(folder, path), absolute(other_folder, other),
                   [&] { return static_cast<int>(syscall(SYS_renameat2, folder, path, other_folder, other, 0)); });
}

int unlinkat(int folder, const char* path, int flags) noexcept {
    return renamed(flags & AT_REMOVEDIR ? 'd' : 'u', absolute(folder, path), "",
                   [&] { return static_cast<int>(syscall(SYS_unlinkat, folder, path, flags)); });
}

int unlink(const char* path) noexcept { return unlinkat(AT_FDCWD, path, 0); }

int rmdir(const char* path) noexcept { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char* path, mode_t mode) noexcept {
    return renamed('k', absolute(folder, path), "",
                   [&] { return static_cast<int>(syscall(SYS_mkdirat, folder, path, mode)); });
}

int mkdir(const char* path, mode_t mode) noexcept { return mkdirat(AT_FDCWD, path, mode); }
}
