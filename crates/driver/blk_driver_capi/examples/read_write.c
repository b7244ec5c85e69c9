/*
 * Writes a pattern to the disk of a vhost-user-blk socket, makes it durable, and reads it back into its own memory.
 *
 *     cc read_write.c -lbareblk_driver -o read_write && ./read_write /run/disk.sock
 *
 * It overwrites the first 64 KiB of the disk.
 */
#define _GNU_SOURCE /* memfd_create */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bareblk_driver.h"

enum { BLOCK_BYTES = 4096, BLOCK_SECTORS = BLOCK_BYTES / 512, BLOCKS = 16 };
enum { BUFFER_BYTES = BLOCK_BYTES * BLOCKS };

static const uint64_t LIMIT_NS = UINT64_C(20) * 1000 * 1000 * 1000;

static void check(int result, const char *what)
{
    if (result < 0) {
        fprintf(stderr, "%s: %s (%d)\n", what, bareblk_last_error(), result);
        exit(EXIT_FAILURE);
    }
}

static unsigned char pattern(size_t at)
{
    return (unsigned char)(at * 7 + at / BLOCK_BYTES);
}

/* Makes the pushed requests visible to the device, and notifies it if it asked for that. A program that holds a lock
 * for the queue would unlock it between the two steps. */
static void submit(bareblk_queue *queue)
{
    bareblk_kick kick;
    check(bareblk_prepare_kick(queue, &kick), "prepare_kick");
    check(bareblk_notify(&kick), "notify");
}

/* Waits until `count` requests have ended, and exits if one of them failed. */
static void finish(bareblk_queue *queue, int count)
{
    while (count > 0) {
        bareblk_completion done[8];
        int taken = bareblk_wait(queue, done, sizeof done / sizeof done[0], LIMIT_NS);
        check(taken, "wait");
        if (taken == 0) {
            fprintf(stderr, "no answer in time\n");
            exit(EXIT_FAILURE);
        }
        for (int at = 0; at < taken; at++) {
            if (done[at].status != BAREBLK_OK) {
                fprintf(stderr, "request %llu: %s\n", (unsigned long long)done[at].token,
                        bareblk_code_text(done[at].status));
                exit(EXIT_FAILURE);
            }
        }
        count -= taken;
    }
}

/* Writes from a buffer of the pool: one request per block, all submitted at once. */
static void write_pattern(bareblk_device *device, bareblk_queue *queue)
{
    bareblk_buffer *buffer;
    check(bareblk_buffer_take(device, BUFFER_BYTES, &buffer), "buffer_take");
    unsigned char *bytes = bareblk_buffer_data(buffer);
    for (size_t at = 0; at < BUFFER_BYTES; at++)
        bytes[at] = pattern(at);

    for (unsigned block = 0; block < BLOCKS; block++) {
        bareblk_range range = {bareblk_buffer_addr(buffer) + (uint64_t)block * BLOCK_BYTES, BLOCK_BYTES};
        uint64_t sector = (uint64_t)block * BLOCK_SECTORS;
        check(bareblk_push_write(queue, sector, &range, 1, 0, block, LIMIT_NS), "push_write");
    }
    submit(queue);
    finish(queue, BLOCKS);

    check(bareblk_push_flush(queue, BLOCKS, LIMIT_NS), "push_flush");
    submit(queue);
    finish(queue, 1);
    bareblk_buffer_release(buffer);
}

/* Reads into the program's own memory: one request with two buffers, whose addresses are pointers. */
static void read_back(bareblk_device *device, bareblk_queue *queue)
{
    int fd = memfd_create("example", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, BUFFER_BYTES) != 0) {
        perror("memfd");
        exit(EXIT_FAILURE);
    }
    unsigned char *bytes = mmap(NULL, BUFFER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) {
        perror("mmap");
        exit(EXIT_FAILURE);
    }
    check(bareblk_register(device, fd, 0, bytes, BUFFER_BYTES), "register");
    close(fd);

    bareblk_range halves[2] = {
        {(uintptr_t)bytes, BUFFER_BYTES / 2},
        {(uintptr_t)(bytes + BUFFER_BYTES / 2), BUFFER_BYTES / 2},
    };
    check(bareblk_push_read(queue, 0, halves, 2, 1, LIMIT_NS), "push_read");
    submit(queue);
    finish(queue, 1);

    for (size_t at = 0; at < BUFFER_BYTES; at++) {
        if (bytes[at] != pattern(at)) {
            fprintf(stderr, "byte %zu is %d, and was written as %d\n", at, bytes[at], pattern(at));
            exit(EXIT_FAILURE);
        }
    }
    check(bareblk_unregister(device, bytes), "unregister");
    munmap(bytes, BUFFER_BYTES);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: read_write SOCKET\n");
        return EXIT_FAILURE;
    }
    bareblk_options options;
    check(bareblk_options_init(&options, sizeof options), "options_init");
    options.queue_size = 64;

    bareblk_device *device;
    bareblk_queue *queue;
    check(bareblk_connect(argv[1], &options, &device, &queue, 1), "connect");

    bareblk_info info;
    check(bareblk_device_info(device, &info, sizeof info), "device_info");
    printf("%llu sectors, blocks of %u bytes\n", (unsigned long long)info.capacity_sectors, info.block_size_bytes);

    write_pattern(device, queue);
    read_back(device, queue);
    printf("%d bytes written and read back\n", BUFFER_BYTES);

    bareblk_queue_free(queue);
    bareblk_disconnect(device);
    return EXIT_SUCCESS;
}
