/* A disk for one SQLite database, preloaded into the processes that use it: a sync that it refuses loses what was
 * written since the last one, as Linux does, and the next sync succeeds although nothing of that is on the disk.
 *
 * DISK_DATABASE names the database. What the disk holds of it and of its log is kept beside them, in NAME.disk: only a
 * successful sync brings anything there, so that a power cut can be played by putting those files in their place.
 * DISK_FAULT names a file; while it is there, the next sync of what it says, "database" or "log", fails and removes it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct range {
    off64_t from, to;
};

struct file {
    const char *name, *suffix;
    struct range *written; /* since the last sync, by this process */
    size_t count, room;
};

static struct file files[] = {{.name = "database", .suffix = ""}, {.name = "log", .suffix = "-wal"}};
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void path_of(const struct file *file, const char *ending, char *path) {
    snprintf(path, PATH_MAX, "%s%s%s", getenv("DISK_DATABASE"), file->suffix, ending);
}

static struct file *named(const char *path) {
    char known[PATH_MAX];
    for (size_t n = 0; n < 2; n++) {
        path_of(&files[n], "", known);
        if (strcmp(path, known) == 0) return &files[n];
    }
    return NULL;
}

static struct file *opened_as(int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return NULL;
    path[length] = 0;
    return named(path);
}

static void note(struct file *file, off64_t from, off64_t to) {
    pthread_mutex_lock(&mutex);
    if (file->count == file->room) {
        file->room = file->room ? 2 * file->room : 1024;
        file->written = realloc(file->written, file->room * sizeof *file->written);
    }
    file->written[file->count++] = (struct range){from, to};
    pthread_mutex_unlock(&mutex);
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t size, off64_t offset) {
    ssize_t (*real)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    ssize_t done = real(descriptor, bytes, size, offset);
    struct file *file = opened_as(descriptor);
    if (file && done > 0) note(file, offset, offset + done);
    return done;
}

ssize_t pwrite(int descriptor, const void *bytes, size_t size, off_t offset) {
    return pwrite64(descriptor, bytes, size, offset);
}

static void on_disk(struct file *file, int descriptor) {
    ssize_t (*write_at)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    static char bytes[1 << 16];
    char path[PATH_MAX];
    path_of(file, ".disk", path);
    int disk = open(path, O_WRONLY | O_CREAT, 0644);
    for (size_t n = 0; n < file->count; n++) {
        off64_t at = file->written[n].from;
        while (at < file->written[n].to) {
            off64_t left = file->written[n].to - at, most = sizeof bytes;
            ssize_t got = pread64(descriptor, bytes, left < most ? left : most, at);
            if (got <= 0) break; /* cut off meanwhile */
            if (write_at(disk, bytes, got, at) != got) abort();
            at += got;
        }
    }
    close(disk);
}

static int refuses(const struct file *file) {
    char kind[16] = "";
    const char *fault = getenv("DISK_FAULT");
    FILE *said = fopen(fault, "r");
    if (!said) return 0;
    if (!fgets(kind, sizeof kind, said)) kind[0] = 0;
    fclose(said);
    return strcmp(kind, file->name) == 0 && unlink(fault) == 0;
}

static int synced(int descriptor, const char *call) {
    int (*real)(int) = dlsym(RTLD_NEXT, call);
    struct file *file = opened_as(descriptor);
    if (!file) return real(descriptor);
    pthread_mutex_lock(&mutex);
    int refused = refuses(file);
    if (!refused) on_disk(file, descriptor);
    file->count = 0;
    pthread_mutex_unlock(&mutex);
    if (refused) errno = EIO;
    return refused ? -1 : 0;
}

int fdatasync(int descriptor) { return synced(descriptor, "fdatasync"); }

int fsync(int descriptor) { return synced(descriptor, "fsync"); }

int ftruncate64(int descriptor, off64_t length) {
    int (*real)(int, off64_t) = dlsym(RTLD_NEXT, "ftruncate64");
    char path[PATH_MAX];
    struct file *file = opened_as(descriptor);
    int failed = real(descriptor, length);
    if (file && !failed) { /* at once: the worst that it can do */
        path_of(file, ".disk", path);
        int disk = open(path, O_WRONLY);
        struct stat found;
        if (disk >= 0 && fstat(disk, &found) == 0 && found.st_size > length) failed = real(disk, length);
        if (disk >= 0) close(disk);
    }
    return failed;
}

int unlink(const char *path) {
    int (*real)(const char *) = dlsym(RTLD_NEXT, "unlink");
    char disk[PATH_MAX];
    struct file *file = named(path);
    if (file) {
        pthread_mutex_lock(&mutex);
        file->count = 0;
        path_of(file, ".disk", disk);
        real(disk);
        pthread_mutex_unlock(&mutex);
    }
    return real(path);
}
