/*
 * Wrong calls return an error code and set a line of text, and the program continues.
 *
 * See also: correct calls (examples/read_write.c).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bareblk_driver.h"

static const uint64_t LIMIT_NS = UINT64_C(20) * 1000 * 1000 * 1000;

/* Checks that the call returns `code`, and that the text of an error contains `text`. */
#define EXPECT(call, code, text) expect((call), (code), (text), #call, __LINE__)

static void expect(int result, int code, const char *text, const char *call, int line)
{
    if (result == code && (code >= 0 || strstr(bareblk_last_error(), text)))
        return;
    fprintf(stderr, "line %d: %s is %d, not %d; \"%s\" (wanted: \"%s\")\n", line, call, result, code,
            bareblk_last_error(), text);
    exit(EXIT_FAILURE);
}

static void null_everywhere(void)
{
    const int bad = BAREBLK_ERR_INVALID;
    bareblk_segment segment = {0, 8, 0};
    bareblk_range range = {0, 512};
    bareblk_info info;
    bareblk_event event;
    bareblk_buffer *buffer;

    EXPECT(bareblk_options_init(NULL, sizeof(bareblk_options)), bad, "options is NULL");
    EXPECT(bareblk_device_info(NULL, &info, sizeof info), bad, "device is NULL");
    EXPECT(bareblk_peer_pid(NULL), bad, "device is NULL");
    EXPECT(bareblk_register(NULL, 0, 0, &info, 4096), bad, "device is NULL");
    EXPECT(bareblk_unregister(NULL, &info), bad, "device is NULL");
    EXPECT(bareblk_next_event(NULL, &event, sizeof event, 0), bad, "device is NULL");
    EXPECT(bareblk_event_fd(NULL), bad, "device is NULL");
    EXPECT(bareblk_buffer_take(NULL, 4096, &buffer), bad, "device is NULL");
    EXPECT(bareblk_buffer_write(NULL, 0, "", 1), bad, "buffer is NULL");
    EXPECT(bareblk_buffer_read(NULL, 0, &info, 1), bad, "buffer is NULL");
    EXPECT(bareblk_buffer_addr(NULL) == 0 && !bareblk_buffer_data(NULL), 1, "");
    EXPECT(bareblk_queue_index(NULL), bad, "queue is NULL");
    EXPECT(bareblk_queue_size(NULL), bad, "queue is NULL");
    EXPECT(bareblk_queue_in_flight(NULL), bad, "queue is NULL");
    EXPECT(bareblk_queue_room(NULL, 1), bad, "queue is NULL");
    EXPECT(bareblk_queue_refuse_short_reads(NULL, 1), bad, "queue is NULL");
    EXPECT(bareblk_queue_next_deadline(NULL, NULL), bad, "queue is NULL");
    EXPECT(bareblk_queue_stats(NULL, NULL, 0), bad, "queue is NULL");
    EXPECT(bareblk_push_read(NULL, 0, &range, 1, 0, 0), bad, "queue is NULL");
    EXPECT(bareblk_push_write(NULL, 0, &range, 1, 0, 0, 0), bad, "queue is NULL");
    EXPECT(bareblk_push_flush(NULL, 0, 0), bad, "queue is NULL");
    EXPECT(bareblk_push_discard(NULL, &segment, 1, 0, 0), bad, "queue is NULL");
    EXPECT(bareblk_push_write_zeroes(NULL, &segment, 1, 0, 0), bad, "queue is NULL");
    EXPECT(bareblk_push_get_id(NULL, range, 0, 0), bad, "queue is NULL");
    EXPECT(bareblk_prepare_kick(NULL, NULL), bad, "queue is NULL");
    EXPECT(bareblk_notify(NULL), bad, "kick is NULL");
    EXPECT(bareblk_submit(NULL), bad, "queue is NULL");
    EXPECT(bareblk_completions(NULL, NULL, 0), bad, "queue is NULL");
    EXPECT(bareblk_wait(NULL, NULL, 0, 0), bad, "queue is NULL");
    EXPECT(bareblk_arm(NULL), bad, "queue is NULL");
    EXPECT(bareblk_completion_fd(NULL), bad, "queue is NULL");
    EXPECT(bareblk_clear_signal(NULL), bad, "queue is NULL");
    EXPECT(bareblk_cancel(NULL, 0), bad, "queue is NULL");
    EXPECT(bareblk_read_blocking(NULL, 0, &info, 512, 0), bad, "queue is NULL");
    EXPECT(bareblk_write_blocking(NULL, 0, &info, 512, 0, 0), bad, "queue is NULL");
    EXPECT(bareblk_flush_blocking(NULL, 0), bad, "queue is NULL");
    EXPECT(bareblk_discard_blocking(NULL, &segment, 1, 0), bad, "queue is NULL");
    EXPECT(bareblk_write_zeroes_blocking(NULL, &segment, 1, 0), bad, "queue is NULL");
    EXPECT(bareblk_get_id_blocking(NULL, &info, 20, 0), bad, "queue is NULL");
    bareblk_queue_free(NULL);
    bareblk_buffer_release(NULL);
    bareblk_disconnect(NULL);
}

static void connections(const char *socket)
{
    bareblk_device *device = (bareblk_device *)&device;
    bareblk_queue *queues[2] = {0};
    bareblk_options options;

    EXPECT(bareblk_connect(NULL, NULL, &device, queues, 2), BAREBLK_ERR_INVALID, "socket_path is NULL");
    EXPECT(bareblk_connect(socket, NULL, NULL, queues, 2), BAREBLK_ERR_INVALID, "device is NULL");
    EXPECT(bareblk_connect(socket, NULL, &device, NULL, 2), BAREBLK_ERR_INVALID, "queues is NULL");
    EXPECT(bareblk_connect(socket, NULL, &device, queues, 0), BAREBLK_ERR_INVALID,
           "queues_len is 0, but it must be from 1 to 65536");
    EXPECT(bareblk_connect("/nowhere/disk.sock", NULL, &device, queues, 2), BAREBLK_ERR_CONNECT,
           "cannot connect to /nowhere/disk.sock: No such file");
    EXPECT(device == NULL, 1, "");

    EXPECT(bareblk_options_init(&options, 3), BAREBLK_ERR_INVALID, "options is 3, but it must be from");
    EXPECT(bareblk_options_init(&options, sizeof options), 0, "");
    options.packed = 7;
    EXPECT(bareblk_connect(socket, &options, &device, queues, 2), BAREBLK_ERR_INVALID,
           "options.packed is 7, but it must be from 0 to 2");
    EXPECT(bareblk_options_init(&options, sizeof options), 0, "");
    options.queue_size = 100;
    EXPECT(bareblk_connect(socket, &options, &device, queues, 2), BAREBLK_ERR_CONNECT, "queue size 100");
    EXPECT(bareblk_options_init(&options, sizeof options), 0, "");
    options.queues = 3;
    EXPECT(bareblk_connect(socket, &options, &device, queues, 2), BAREBLK_ERR_INVALID, "queues_len is 2");
    EXPECT(device == NULL && queues[0] == NULL, 1, "");
}

static void buffers(bareblk_device *device)
{
    bareblk_buffer *buffer;
    char byte = 1;
    EXPECT(bareblk_buffer_take(device, 4096, NULL), BAREBLK_ERR_INVALID, "buffer is NULL");
    EXPECT(bareblk_buffer_take(device, UINT32_MAX, &buffer), BAREBLK_ERR_MEMORY,
           "the pool has no 4294967296 contiguous bytes");
    EXPECT(buffer == NULL, 1, "");
    EXPECT(bareblk_buffer_take(device, 4096, &buffer), 0, "");
    EXPECT(bareblk_buffer_write(buffer, 4096, &byte, 1), BAREBLK_ERR_INVALID, "not entirely inside a buffer of 4096 bytes");
    EXPECT(bareblk_buffer_write(buffer, 4095, &byte, SIZE_MAX), BAREBLK_ERR_INVALID, "not entirely inside a buffer");
    EXPECT(bareblk_buffer_read(buffer, UINT32_MAX, &byte, 1), BAREBLK_ERR_INVALID, "not entirely inside a buffer");
    EXPECT(bareblk_buffer_read(buffer, 0, NULL, 1), BAREBLK_ERR_INVALID, "out is NULL");
    bareblk_buffer_release(buffer);

    EXPECT(bareblk_register(device, -1, 0, &byte, 4096), BAREBLK_ERR_INVALID, "fd is -1");
    EXPECT(bareblk_register(device, 1 << 20, 0, &byte, 4096), BAREBLK_ERR_SYSTEM,
           "file descriptor 1048576 cannot be duplicated: Bad file descriptor");
    EXPECT(bareblk_register(device, 0, 0, NULL, 4096), BAREBLK_ERR_INVALID, "addr is NULL");
    EXPECT(bareblk_register(device, 0, 7, &byte, 4096), BAREBLK_ERR_INVALID, "begins at byte 7 of its file");
    EXPECT(bareblk_unregister(device, &byte), BAREBLK_ERR_NOT_REGISTERED, "no memory is registered at");
}

static void requests(bareblk_device *device, bareblk_queue *queue)
{
    char own[512];
    bareblk_buffer *buffer;
    EXPECT(bareblk_buffer_take(device, 4096, &buffer), 0, "");
    bareblk_range foreign = {(uintptr_t)own, sizeof own};
    bareblk_range half = {bareblk_buffer_addr(buffer), 256}, empty = {half.addr, 0}, huge = {half.addr, UINT64_MAX};
    bareblk_segment flagged = {0, 8, BAREBLK_UNMAP};

    EXPECT(bareblk_push_read(queue, 0, &foreign, 1, 0, 0), BAREBLK_ERR_NOT_REGISTERED, "is not in registered memory");
    EXPECT(bareblk_push_read(queue, 0, &half, 1, 0, 0), BAREBLK_ERR_INVALID, "256 bytes of data");
    EXPECT(bareblk_push_read(queue, 0, &empty, 1, 0, 0), BAREBLK_ERR_INVALID, "is empty");
    EXPECT(bareblk_push_read(queue, 0, &huge, 1, 0, 0), BAREBLK_ERR_INVALID, "it must be from 1 to 4294967295");
    EXPECT(bareblk_push_read(queue, 0, NULL, 1, 0, 0), BAREBLK_ERR_INVALID, "buffers is NULL");
    EXPECT(bareblk_push_read(queue, 0, &half, SIZE_MAX, 0, 0), BAREBLK_ERR_INVALID, "it must be from 0 to 32768");
    EXPECT(bareblk_push_read(queue, 0, (bareblk_range *)(own + 1 - (uintptr_t)own % 2), 1, 0, 0), BAREBLK_ERR_INVALID,
           "not aligned");
    EXPECT(bareblk_push_write(queue, 0, &half, 1, 6, 0, 0), BAREBLK_ERR_INVALID, "flags 0x6 has unknown bits");
    EXPECT(bareblk_push_discard(queue, &flagged, 1, 0, 0), BAREBLK_ERR_INVALID, "flags of a segment 0x1");
    EXPECT(bareblk_push_discard(queue, &flagged, 17, 0, 0), BAREBLK_ERR_INVALID, "it must be from 0 to 16");
    EXPECT(bareblk_push_get_id(queue, half, 0, 0) == 0, 1, "");
    EXPECT(bareblk_cancel(queue, 4711), BAREBLK_ERR_NOT_FOUND, "no request in flight has the token 4711");
    EXPECT(bareblk_flush_blocking(queue, LIMIT_NS), BAREBLK_ERR_BUSY, "1 requests are in flight");
    EXPECT(bareblk_completions(queue, NULL, 1), BAREBLK_ERR_INVALID, "completions is NULL");
    EXPECT(bareblk_queue_next_deadline(queue, NULL), BAREBLK_ERR_INVALID, "left_ns is NULL");
    EXPECT(bareblk_queue_stats(queue, NULL, sizeof(bareblk_stats)), BAREBLK_ERR_INVALID, "stats is NULL");
    EXPECT(bareblk_get_id_blocking(queue, own, 19, LIMIT_NS), BAREBLK_ERR_INVALID, "room for the id is 19");
    EXPECT(bareblk_read_blocking(queue, 0, own, SIZE_MAX, LIMIT_NS), BAREBLK_ERR_INVALID, "out is 18446744073709551615");
    bareblk_buffer_release(buffer);
}

/* A notification outlives its queue and its device, and is sent once. */
static void late_kick(bareblk_device *device, bareblk_queue *queue)
{
    bareblk_kick kick, garbage = {{99, 99, 99, 99}}, nothing = {{0}};
    EXPECT(bareblk_push_flush(queue, 1, BAREBLK_FOREVER), 0, "");
    EXPECT(bareblk_prepare_kick(queue, NULL), BAREBLK_ERR_INVALID, "kick is NULL");
    EXPECT(bareblk_prepare_kick(queue, &kick) >= 0, 1, "");
    bareblk_queue_free(queue);
    bareblk_disconnect(device);
    EXPECT(bareblk_notify(&kick), 0, "");
    EXPECT(bareblk_notify(&kick), 0, "");
    EXPECT(bareblk_notify(&nothing), 0, "");
    EXPECT(bareblk_notify(&garbage), BAREBLK_ERR_INVALID, "state of the kick is 99");
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return EXIT_FAILURE;
    EXPECT(bareblk_version() == BAREBLK_VERSION && bareblk_last_error()[0] == '\0', 1, "");
    EXPECT(strcmp(bareblk_code_text(BAREBLK_ERR_LOST), bareblk_code_text(12345)) != 0, 1, "");
    null_everywhere();
    connections(argv[1]);

    bareblk_device *device;
    bareblk_queue *queue;
    EXPECT(bareblk_connect(argv[1], NULL, &device, &queue, 1), 0, "");
    buffers(device);
    requests(device, queue);
    late_kick(device, queue);
    return EXIT_SUCCESS;
}
