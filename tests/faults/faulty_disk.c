/* A library for LD_PRELOAD: the n-th call that changes a folder fails, or kills the process.

   Counted calls are those below the folder that `struct control` names, by any thread of any process
   that maps the file of DISK_CONTROL: also of libraries that do not go through Python. A write that
   fails has written half of its bytes, as on a disk that becomes full. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* disk.py has the same layout. */
struct control {
    char root[1024]; /* empty: nothing is counted */
    long at;         /* the number of the call that fails, from 1; 0: none */
    int error;       /* of errno; 0: SIGKILL */
    int stays;       /* later calls fail, too; those that free space only for EROFS and EIO */
    long calls;
    int fired;
    char what[512];  /* the call that failed and its path */
};

enum kind { TAKES_SPACE, FREES_SPACE };

static struct control *control;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("DISK_CONTROL");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *memory = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED)
        control = memory;
    close(file);
}

static int is_below(const char *path) {
    size_t size = strlen(control->root);
    return !strncmp(path, control->root, size) && (path[size] == '/' || path[size] == 0);
}

/* Return -1 with errno set if this call fails; may not return. */
static int fails(const char *call, const char *path, enum kind kind, int descriptor, const void *bytes,
                 size_t size) {
    static ssize_t (*write_bytes)(int, const void *, size_t);
    long number = __atomic_add_fetch(&control->calls, 1, __ATOMIC_SEQ_CST);
    int again = control->stays && control->fired &&
                (kind == TAKES_SPACE || control->error == EROFS || control->error == EIO);
    if (number != control->at && !again)
        return 0;
    if (number == control->at) {
        snprintf(control->what, sizeof control->what, "%s %s", call, path);
        control->fired = 1;
        if (size > 1) {
            if (!write_bytes)
                *(void **)&write_bytes = dlsym(RTLD_NEXT, "write");
            (void)!write_bytes(descriptor, bytes, size / 2);
        }
    }
    if (control->error == 0)
        kill(getpid(), SIGKILL);
    errno = control->error;
    return -1;
}

static int on_file(const char *call, int descriptor, enum kind kind, const void *bytes, size_t size) {
    char link[64], path[PATH_MAX];
    int before = errno;
    if (!control || !control->root[0])
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length <= 0)
        return 0;
    path[length] = 0;
    return is_below(path) ? fails(call, path, kind, descriptor, bytes, size) : 0;
}

static int on_path(const char *call, int folder, const char *name, enum kind kind) {
    char link[64], path[2 * PATH_MAX];
    int before = errno;
    ssize_t length = 0;
    if (!control || !control->root[0] || !name)
        return 0;
    if (name[0] != '/') {
        if (folder == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        length = readlink(link, path, PATH_MAX - 1);
        errno = before;
        if (length <= 0)
            return 0;
        path[length++] = '/';
    }
    snprintf(path + length, sizeof path - (size_t)length, "%s", name);
    return is_below(path) ? fails(call, path, kind, -1, NULL, 0) : 0;
}

#define REAL(result, name, ...)                     \
    static result (*real)(__VA_ARGS__);             \
    if (!real)                                      \
        *(void **)&real = dlsym(RTLD_NEXT, #name)

#define CHANGES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))

#define OPEN(name)                                                                 \
    int name(const char *path, int flags, ...) {                                   \
        mode_t mode = 0;                                                           \
        if (flags & (O_CREAT | O_TMPFILE)) {                                       \
            va_list rest;                                                          \
            va_start(rest, flags);                                                 \
            mode = va_arg(rest, mode_t);                                           \
            va_end(rest);                                                          \
        }                                                                          \
        REAL(int, name, const char *, int, ...);                                   \
        if (CHANGES(flags) && on_path("open", AT_FDCWD, path, TAKES_SPACE))        \
            return -1;                                                             \
        return real(path, flags, mode);                                            \
    }

#define OPENAT(name)                                                               \
    int name(int folder, const char *path, int flags, ...) {                       \
        mode_t mode = 0;                                                           \
        if (flags & (O_CREAT | O_TMPFILE)) {                                       \
            va_list rest;                                                          \
            va_start(rest, flags);                                                 \
            mode = va_arg(rest, mode_t);                                           \
            va_end(rest);                                                          \
        }                                                                          \
        REAL(int, name, int, const char *, int, ...);                              \
        if (CHANGES(flags) && on_path("open", folder, path, TAKES_SPACE))          \
            return -1;                                                             \
        return real(folder, path, flags, mode);                                    \
    }

#define FOPEN(name)                                                                \
    FILE *name(const char *path, const char *mode) {                               \
        REAL(FILE *, name, const char *, const char *);                            \
        if (strpbrk(mode, "wa+") && on_path("fopen", AT_FDCWD, path, TAKES_SPACE)) \
            return NULL;                                                           \
        return real(path, mode);                                                   \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int descriptor, const void *bytes, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    return on_file("write", descriptor, TAKES_SPACE, bytes, size) ? -1 : real(descriptor, bytes, size);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    return on_file("writev", descriptor, TAKES_SPACE, NULL, 0) ? -1 : real(descriptor, parts, count);
}

#define PWRITE(name)                                                                            \
    ssize_t name(int descriptor, const void *bytes, size_t size, off_t offset) {                \
        REAL(ssize_t, name, int, const void *, size_t, off_t);                                  \
        return on_file("pwrite", descriptor, TAKES_SPACE, NULL, 0) ? -1                         \
                                                                   : real(descriptor, bytes, size, offset); \
    }

PWRITE(pwrite)
PWRITE(pwrite64)

#define COPY(name)                                                                   \
    ssize_t name(int to, int from, off_t *offset, size_t size) {                     \
        REAL(ssize_t, name, int, int, off_t *, size_t);                              \
        return on_file("copy", to, TAKES_SPACE, NULL, 0) ? -1 : real(to, from, offset, size); \
    }

COPY(sendfile)
COPY(sendfile64)

ssize_t copy_file_range(int from, off_t *from_at, int to, off_t *to_at, size_t size, unsigned flags) {
    REAL(ssize_t, copy_file_range, int, off_t *, int, off_t *, size_t, unsigned);
    return on_file("copy", to, TAKES_SPACE, NULL, 0) ? -1 : real(from, from_at, to, to_at, size, flags);
}

#define ON_DESCRIPTOR(name, kind)                                                   \
    int name(int descriptor) {                                                      \
        REAL(int, name, int);                                                       \
        return on_file(#name, descriptor, kind, NULL, 0) ? -1 : real(descriptor);   \
    }

ON_DESCRIPTOR(fsync, TAKES_SPACE)
ON_DESCRIPTOR(fdatasync, TAKES_SPACE)

#define TRUNCATE(name)                                                                          \
    int name(int descriptor, off_t size) {                                                      \
        REAL(int, name, int, off_t);                                                            \
        return on_file("ftruncate", descriptor, FREES_SPACE, NULL, 0) ? -1 : real(descriptor, size); \
    }

TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    return on_path("mkdir", AT_FDCWD, path, TAKES_SPACE) ? -1 : real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t);
    return on_path("mkdir", folder, path, TAKES_SPACE) ? -1 : real(folder, path, mode);
}

int unlink(const char *path) {
    REAL(int, unlink, const char *);
    return on_path("unlink", AT_FDCWD, path, FREES_SPACE) ? -1 : real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    return on_path("unlink", folder, path, FREES_SPACE) ? -1 : real(folder, path, flags);
}

int rmdir(const char *path) {
    REAL(int, rmdir, const char *);
    return on_path("rmdir", AT_FDCWD, path, FREES_SPACE) ? -1 : real(path);
}

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    return on_path("rename", AT_FDCWD, to, FREES_SPACE) ? -1 : real(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    return on_path("rename", to_folder, to, FREES_SPACE) ? -1 : real(from_folder, from, to_folder, to);
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    return on_path("rename", to_folder, to, FREES_SPACE) ? -1
                                                         : real(from_folder, from, to_folder, to, flags);
}

int link(const char *from, const char *to) {
    REAL(int, link, const char *, const char *);
    return on_path("link", AT_FDCWD, to, TAKES_SPACE) ? -1 : real(from, to);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    REAL(int, linkat, int, const char *, int, const char *, int);
    return on_path("link", to_folder, to, TAKES_SPACE) ? -1 : real(from_folder, from, to_folder, to, flags);
}

int symlink(const char *target, const char *path) {
    REAL(int, symlink, const char *, const char *);
    return on_path("symlink", AT_FDCWD, path, TAKES_SPACE) ? -1 : real(target, path);
}
