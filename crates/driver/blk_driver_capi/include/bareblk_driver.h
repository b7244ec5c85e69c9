/*
 * bareblk_driver.h: a virtio-blk driver in user space, for any vhost-user-blk socket.
 *
 *     bareblk_connect -> bareblk_push_* ... -> bareblk_submit -> bareblk_wait ... -> bareblk_disconnect
 *
 * Generated from the sources of crates/driver/blk_driver_capi: change those. docs/how-to/driver-in-c.md has an example.
 *
 * Results. Calls that return int return a negative bareblk_code for an error. Otherwise they return 0, or what their
 * description says. After an error, bareblk_last_error() has a line of text. Every call checks for NULL and checks
 * lengths; no call ends the program.
 *
 * Units. A sector has 512 bytes, whatever the device's block size is. All other values have their unit in their name.
 * Times are nanoseconds from now on; BAREBLK_FOREVER means no limit.
 *
 * Threads. Only one thread at a time may use a queue; several threads can share it under a lock of the program. Several
 * threads may use a device or a buffer at once. Any thread may use a bareblk_kick, once. The call that frees a handle
 * must be the last use of the handle.
 *
 * Ownership. The description of a handle names the call that frees it; the order does not matter. The caller owns the
 * objects behind pointers, and calls access them only until they return. Nothing else may use an object that a call
 * writes. Buffers of requests are the exception: they belong to the device until their request has ended. If it ended
 * with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED, they belong to the device until its BAREBLK_RETURNED.
 *
 * Growth. Structures that may grow are passed with their size: sizeof of the type, as the program knows it. A program
 * that was compiled with an older header gets the fields that it knows. A program with a newer header finds zeroes in
 * fields that the library does not know, and gets an error if it sets such a field.
 */


#ifndef BAREBLK_DRIVER_H
#define BAREBLK_DRIVER_H

#include <stddef.h>
#include <stdint.h>

// A time limit or deadline that never comes.
#define BAREBLK_FOREVER UINT64_MAX

// For bareblk_options.packed: split rings.
#define BAREBLK_PACKED_NO 0

// For bareblk_options.packed: packed rings; connecting fails if the device has none.
#define BAREBLK_PACKED_YES 1

// For bareblk_options.packed: the layout that suits the device.
#define BAREBLK_PACKED_ANY 2

// For bareblk_options.in_flight_log: use a log if the device has one and reconnect_ns is not 0.
#define BAREBLK_LOG_ANY 0

// For bareblk_options.in_flight_log: use no log.
#define BAREBLK_LOG_NO 1

// For bareblk_options.in_flight_log: use a log, and fail if the device has none.
#define BAREBLK_LOG_YES 2

// bareblk_event.kind: the configuration changed (by a resize, for example); bareblk_device_info has the new one.
#define BAREBLK_EVENT_CONFIG_CHANGED 1

// bareblk_event.kind: the back-end disconnected.
#define BAREBLK_EVENT_DISCONNECTED 2

// bareblk_event.kind: a back-end is connected again; the counts say what the driver did.
#define BAREBLK_EVENT_RECONNECTED 3

// bareblk_event.kind: no back-end came back, and the driver does not wait any longer; the reason says why. This is
// the last event.
#define BAREBLK_EVENT_GAVE_UP 4

// Bytes of bareblk_event.reason.
#define BAREBLK_REASON_BYTES 256

// A write completes when it is durable.
#define BAREBLK_DURABLE 1

// The device may free the blocks of a segment that it zeroes.
#define BAREBLK_UNMAP 1

// Bytes of a device's serial.
#define BAREBLK_ID_BYTES 20

// Version of this header: major << 16 | minor << 8 | patch.
#define BAREBLK_VERSION 256

// The result of a call or a request. Negative values are errors.
typedef enum bareblk_code {
    // Done.
    BAREBLK_OK = 0,
    // Only in completions, and not the end of a request: the device returned the buffers of a request that had ended
    // with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED.
    BAREBLK_RETURNED = 1,
    // An invalid argument: NULL, a length, a value without meaning; or a request that no device accepts (half a
    // sector, an empty buffer, too many buffers).
    BAREBLK_ERR_INVALID = -1,
    // The queue is full: take completions first.
    BAREBLK_ERR_FULL = -2,
    // A buffer lies neither in the pool nor in registered memory; or no memory is registered at this address.
    BAREBLK_ERR_NOT_REGISTERED = -3,
    // The device does not offer this request.
    BAREBLK_ERR_NOT_OFFERED = -4,
    // The device is read-only.
    BAREBLK_ERR_READ_ONLY = -5,
    // The connection failed.
    BAREBLK_ERR_CONNECT = -6,
    // No memory: the pool is exhausted, or the kernel or the back-end refuses the memory.
    BAREBLK_ERR_MEMORY = -7,
    // The back-end disconnected, and the driver does not wait for another one. The queue accepts no more requests.
    BAREBLK_ERR_DISCONNECTED = -8,
    // The device broke the rules of the ring. The queue accepts no more requests.
    BAREBLK_ERR_DEVICE = -9,
    // The kernel refused a call.
    BAREBLK_ERR_SYSTEM = -10,
    // A blocking call on a queue with requests in flight.
    BAREBLK_ERR_BUSY = -11,
    // No request in flight has this token.
    BAREBLK_ERR_NOT_FOUND = -12,
    // The device reported an I/O error.
    BAREBLK_ERR_IO = -20,
    // The device does not support the request.
    BAREBLK_ERR_UNSUPPORTED = -21,
    // The device answered with a status that has no meaning.
    BAREBLK_ERR_BAD_STATUS = -22,
    // The device stored fewer bytes than a successful read must (only after bareblk_queue_refuse_short_reads).
    BAREBLK_ERR_SHORT_READ = -23,
    // The device did not answer before the deadline. It may still use the buffers.
    BAREBLK_ERR_DEADLINE = -24,
    // The program cancelled the request. The device may still use the buffers.
    BAREBLK_ERR_CANCELLED = -25,
    // The device disconnected; it is unknown whether it carried out the request.
    BAREBLK_ERR_LOST = -26,
    // A bug in this library. The handle of that call accepts only the call that frees it.
    BAREBLK_ERR_BUG = -99,
} bareblk_code;

// A part of a device's pool. Several threads may use it at once. It may outlive its device.
typedef struct bareblk_buffer bareblk_buffer;

// A session with a back-end. Several threads may use it at once, until bareblk_disconnect.
typedef struct bareblk_device bareblk_device;

// One queue of a device. Only one thread at a time may use it. It outlives bareblk_disconnect: requests in flight
// then end with BAREBLK_ERR_LOST, and the program can still take their completions.
typedef struct bareblk_queue bareblk_queue;

// How to connect. bareblk_options_init fills it in; the caller then changes it. Later versions of this library may
// add fields at its end: struct_size says which version the caller was compiled with.
typedef struct bareblk_options {
    // Bytes of this structure, set by bareblk_options_init.
    uint32_t struct_size;
    // Queues to use; connecting fails if the device has fewer. Initially 1.
    uint16_t queues;
    // Descriptors per queue, a power of two. Initially 256.
    uint16_t queue_size;
    // Memory for buffers, in bytes, rounded up to pages. Initially 16 MiB.
    uint64_t pool_bytes;
    // Longest time for connecting, and for each message to the back-end, in nanoseconds. Initially 5 s.
    uint64_t timeout_ns;
    // How long to wait for a new back-end after a disconnect, in nanoseconds. Initially 0: do not wait.
    uint64_t reconnect_ns;
    // BAREBLK_PACKED_NO, _YES, or _ANY (initially).
    uint8_t packed;
    // 1: use indirect descriptors if offered (initially). 0: do not.
    uint8_t indirect;
    // 1: use EVENT_IDX if offered (initially). 0: do not.
    uint8_t event_idx;
    // 1: the pool has pages of 2 MiB, which must be reserved (vm.nr_hugepages). 0: ordinary pages (initially).
    uint8_t huge_pages;
    // Let the back-end log its requests in flight, so that its successor can repeat them: BAREBLK_LOG_ANY
    // (initially), _NO, or _YES.
    uint32_t in_flight_log;
} bareblk_options;

// What the device says about itself (virtio 1.3 §5.2.4). Later versions of this library may add fields at its end.
typedef struct bareblk_info {
    // Size of the disk, in sectors of 512 bytes.
    uint64_t capacity_sectors;
    // Virtio features that both sides agreed on.
    uint64_t features;
    // vhost-user protocol features that both sides agreed on.
    uint64_t protocol_features;
    // Size of a logical block, in bytes.
    uint32_t block_size_bytes;
    // Most buffers in a request.
    uint32_t max_segments;
    // Most segments in a discard; 0: the device has no discard.
    uint32_t max_discard_segments;
    // Most sectors in each of these segments.
    uint32_t max_discard_sectors;
    // Most segments in a write-zeroes; 0: the device has no write-zeroes.
    uint32_t max_write_zeroes_segments;
    // Most sectors in each of these segments.
    uint32_t max_write_zeroes_sectors;
    // Queues that the device has.
    uint16_t num_queues;
    // 1: the device accepts no writes.
    uint8_t read_only;
    // 1: the device has a write cache that can be flushed.
    uint8_t flush;
    // 0.
    uint32_t reserved;
} bareblk_info;

// Something that happened to a device. Later versions of this library may add fields at its end. Ignore kinds that
// you do not know.
typedef struct bareblk_event {
    // One of BAREBLK_EVENT_*.
    uint32_t kind;
    // BAREBLK_EVENT_RECONNECTED: number of attempts to connect.
    uint32_t attempts;
    // BAREBLK_EVENT_RECONNECTED: how long the device was disconnected, in nanoseconds.
    uint64_t away_ns;
    // BAREBLK_EVENT_RECONNECTED: requests that the driver sent again; 0 if kept_rings.
    uint64_t resubmitted;
    // BAREBLK_EVENT_RECONNECTED: requests that the driver found completed in the old ring; 0 if kept_rings.
    uint64_t completed;
    // BAREBLK_EVENT_RECONNECTED: queues whose owners had not made a call by then. The two counts above do not include
    // their requests, which the driver sends again at the owner's next call.
    uint32_t owners_waited_for;
    // BAREBLK_EVENT_RECONNECTED: 1 if the queues keep their rings, and the back-end repeats the requests that its
    // predecessor had begun (bareblk_options.in_flight_log). Else 0.
    uint32_t kept_rings;
    // BAREBLK_EVENT_GAVE_UP: one line, with NUL at its end. Else empty.
    char reason[256];
} bareblk_event;

// Counters since the queue was created.
typedef struct bareblk_stats {
    // Requests that the queue accepted.
    uint64_t pushed;
    // Requests that ended.
    uint64_t completed;
    // Notifications that the device wanted.
    uint64_t kicks;
    // Batches that were published to the device.
    uint64_t publications;
    // How often the queue's owner slept while it waited for a completion.
    uint64_t sleeps;
} bareblk_stats;

// One buffer of a request: a part of the pool or of registered memory.
typedef struct bareblk_range {
    // In the pool: bareblk_buffer_addr, plus an offset. In registered memory: the pointer, (uintptr_t) pointer.
    uint64_t addr;
    // Its length in bytes, at most UINT32_MAX.
    uint64_t len_bytes;
} bareblk_range;

// Consecutive sectors, for discard and write-zeroes.
typedef struct bareblk_segment {
    // First sector of 512 bytes.
    uint64_t sector;
    // Number of sectors.
    uint32_t sectors;
    // Write-zeroes only: BAREBLK_UNMAP, or 0.
    uint32_t flags;
} bareblk_segment;

// A notification that the device asked for and has not got yet, or nothing. bareblk_prepare_kick creates it, and
// bareblk_notify ends it, once. A copy of this structure is the same notification: use one of them and forget the
// other. Any thread may use it, even after its queue or device was freed. Until the program sends it, the device may
// sleep, and threads that push meanwhile learn that no notification is needed.
typedef struct bareblk_kick {
    // Private to this library.
    size_t opaque[4];
} bareblk_kick;

// How a request ended. Each request ends exactly once. After BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED, exactly
// one BAREBLK_RETURNED follows; from then on the buffers belong to the program again.
typedef struct bareblk_completion {
    // The token of the request.
    uint64_t token;
    // The result: a bareblk_code.
    int32_t status;
    // Bytes that the device says it stored, for a read or an id.
    uint32_t stored_bytes;
    // With BAREBLK_ERR_BAD_STATUS: the status byte. Else 0.
    uint32_t detail;
    // 0.
    uint32_t reserved;
} bareblk_completion;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The meaning of a code in a few words; never NULL. Use it for the status of completions; bareblk_last_error says
// more about calls that failed. The text stays valid as long as the program runs.
const char *bareblk_code_text(int32_t code);

// One line about the last call of this thread that returned an error; empty if no call has. Successful calls do not
// change it. It is valid until the next error of the same thread, or the thread's end, and has at most 511 bytes of
// UTF-8.
const char *bareblk_last_error(void);

// Fills in the usual options. struct_size: sizeof (bareblk_options).
//
// Errors: BAREBLK_ERR_INVALID.
int bareblk_options_init(struct bareblk_options *options, size_t struct_size);

// Connects to a vhost-user-blk socket, negotiates, shares memory and starts the queues.
//
// `options`: NULL for the usual options. `queues`: room for `queues_len` handles, at least as many as the options ask
// for (usually 1); the call sets the rest to NULL. The caller owns the handles: free each queue with
// bareblk_queue_free, and the device with bareblk_disconnect, in any order.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_CONNECT. After an error, all handles are NULL.
int bareblk_connect(const char *socket_path,
                    const struct bareblk_options *options,
                    struct bareblk_device **device,
                    struct bareblk_queue **queues,
                    size_t queues_len);

// Stores the device's latest description. struct_size: sizeof (bareblk_info).
int bareblk_device_info(const struct bareblk_device *device, struct bareblk_info *info, size_t struct_size);

// Returns the process id of the back-end, as the socket names it; 0 if it is not visible from here; or an error.
int bareblk_peer_pid(const struct bareblk_device *device);

// Lets requests use the caller's own memory: `len_bytes` of a file (a memfd), from `offset_bytes` on (a multiple of
// the page size), that the caller has mapped at `addr` with MAP_SHARED. Requests name it by its pointers.
//
// The caller keeps the descriptor and may close it afterwards. This library and the back-end map the file themselves:
// the caller's mapping only gives the addresses, and may be unmapped without bareblk_unregister.
//
// Errors: BAREBLK_ERR_INVALID, BAREBLK_ERR_MEMORY, BAREBLK_ERR_SYSTEM.
int bareblk_register(const struct bareblk_device *device,
                     int fd,
                     uint64_t offset_bytes,
                     const void *addr,
                     uint64_t len_bytes);

// Removes the memory that was registered at `addr`. No request that uses it may be in flight; later requests are
// refused. When the call returns, the back-end has unmapped the memory, or is disconnected.
//
// Errors: BAREBLK_ERR_NOT_REGISTERED, BAREBLK_ERR_MEMORY.
int bareblk_unregister(const struct bareblk_device *device,
                       const void *addr);

// Ends the session and frees its handle, within the time limits of two messages. Requests in flight end with
// BAREBLK_ERR_LOST; the handles of queues and buffers stay. A back-end that hangs, or answers too early, may still
// store into the buffers of lost reads: take all completions before you use such buffers again. NULL does nothing.
void bareblk_disconnect(struct bareblk_device *device);

// Stores the next event, waiting up to `limit_ns` nanoseconds for one (0: not at all; BAREBLK_FOREVER: without limit).
// struct_size: sizeof (bareblk_event). Several threads may wait; each event goes to one of them.
//
// Returns 1; or 0 if the time is over (then `kind` is 0); or an error.
int bareblk_next_event(const struct bareblk_device *device,
                       struct bareblk_event *event,
                       size_t struct_size,
                       uint64_t limit_ns);

// Returns a descriptor for poll and epoll that is readable while there are events, or an error. It belongs to the
// device: do not close it.
int bareblk_event_fd(const struct bareblk_device *device);

// Takes `len_bytes` from the pool, aligned to 4096; the contents are those of the last use. The caller owns the buffer
// until bareblk_buffer_release.
//
// Returns 0 or an error: BAREBLK_ERR_MEMORY, BAREBLK_ERR_INVALID. After an error, the handle is NULL.
int bareblk_buffer_take(const struct bareblk_device *device,
                        uint32_t len_bytes,
                        struct bareblk_buffer **buffer);

// Returns the buffer's address for bareblk_range, as the device knows it; it is not a pointer. 0 for NULL.
uint64_t bareblk_buffer_addr(const struct bareblk_buffer *buffer);

// Returns a pointer to the buffer's bytes. The device may change them at any moment while a request names them. NULL
// for NULL.
void *bareblk_buffer_data(const struct bareblk_buffer *buffer);

// Copies `count` bytes into the buffer, from its byte `offset_bytes` on. `data` must not lie in the pool.
int bareblk_buffer_write(const struct bareblk_buffer *buffer,
                         uint32_t offset_bytes,
                         const void *data,
                         size_t count);

// Copies `count` bytes out of the buffer, from its byte `offset_bytes` on. `out` must not lie in the pool.
int bareblk_buffer_read(const struct bareblk_buffer *buffer, uint32_t offset_bytes, void *out, size_t count);

// Returns the buffer to the pool, from where another call may take it. So no request in flight may name it. (After
// BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED a request names it until BAREBLK_RETURNED; after BAREBLK_ERR_LOST see
// bareblk_disconnect.) NULL does nothing.
void bareblk_buffer_release(struct bareblk_buffer *buffer);

// Returns the queue's index at the device, or an error.
int bareblk_queue_index(struct bareblk_queue *queue);

// Returns the queue's size in descriptors, or an error.
int bareblk_queue_size(struct bareblk_queue *queue);

// Returns how many requests were accepted and have not ended, or an error. A request that ended while the device
// still has its buffers counts.
int bareblk_queue_in_flight(struct bareblk_queue *queue);

// Returns how many requests of `buffers` buffers each can be pushed now, or an error.
int bareblk_queue_room(struct bareblk_queue *queue, uint16_t buffers);

// Decides about a read that the device reports as successful although it stored fewer bytes than requested. `refuse`
// = 1: the read ends with BAREBLK_ERR_SHORT_READ. 0 (initially, because some devices do not say how much they
// stored): the driver believes the device. bareblk_completion.stored_bytes has the number in both cases.
int bareblk_queue_refuse_short_reads(struct bareblk_queue *queue,
                                     int refuse);

// Finds the earliest deadline of a request in flight, for programs that sleep by themselves (on
// bareblk_completion_fd): only a call of bareblk_completions ends a late request.
//
// Returns 1 and stores the nanoseconds until the deadline; or 0 if no request has one; or an error.
int bareblk_queue_next_deadline(struct bareblk_queue *queue, uint64_t *left_ns);

// Stores the counters. struct_size: sizeof (bareblk_stats).
int bareblk_queue_stats(struct bareblk_queue *queue, struct bareblk_stats *stats, size_t struct_size);

// Ends the use of a queue and frees its handle. Requests in flight are given up: the device may use their buffers
// until it is disconnected. NULL does nothing.
void bareblk_queue_free(struct bareblk_queue *queue);

// Adds a read: from `sector` (of 512 bytes) on into `count` buffers, a multiple of 512 bytes in all. The device sees
// it after the next bareblk_prepare_kick or bareblk_submit.
//
// The completion has the same `token`. `deadline_ns`: if the device has not answered after this time, the request
// ends with BAREBLK_ERR_DEADLINE; BAREBLK_FOREVER: no deadline. The call copies the list of buffers. The buffers
// themselves belong to the device until the request has ended (after BAREBLK_ERR_DEADLINE and BAREBLK_ERR_CANCELLED:
// until BAREBLK_RETURNED).
//
// Errors: BAREBLK_ERR_FULL, BAREBLK_ERR_NOT_REGISTERED, BAREBLK_ERR_INVALID, and those of a queue that has ended:
// BAREBLK_ERR_DISCONNECTED, BAREBLK_ERR_DEVICE. After an error the queue is unchanged.
int bareblk_push_read(struct bareblk_queue *queue,
                      uint64_t sector,
                      const struct bareblk_range *buffers,
                      size_t count,
                      uint64_t token,
                      uint64_t deadline_ns);

// Adds a write: from `count` buffers to `sector` on. `flags`: BAREBLK_DURABLE, or 0: durable after the next flush.
// Otherwise as bareblk_push_read; also BAREBLK_ERR_READ_ONLY.
int bareblk_push_write(struct bareblk_queue *queue,
                       uint64_t sector,
                       const struct bareblk_range *buffers,
                       size_t count,
                       uint32_t flags,
                       uint64_t token,
                       uint64_t deadline_ns);

// Adds a flush: it makes all writes durable that completed before. Otherwise as bareblk_push_read.
int bareblk_push_flush(struct bareblk_queue *queue, uint64_t token, uint64_t deadline_ns);

// Adds a discard: the device may forget the contents of `count` segments (at most bareblk_info.max_discard_segments),
// whose flags are 0. Otherwise as bareblk_push_read; also BAREBLK_ERR_NOT_OFFERED, BAREBLK_ERR_READ_ONLY.
int bareblk_push_discard(struct bareblk_queue *queue,
                         const struct bareblk_segment *segments,
                         size_t count,
                         uint64_t token,
                         uint64_t deadline_ns);

// Adds a write-zeroes: `count` segments (at most bareblk_info.max_write_zeroes_segments) read as zeroes afterwards.
// Otherwise as bareblk_push_discard.
int bareblk_push_write_zeroes(struct bareblk_queue *queue,
                              const struct bareblk_segment *segments,
                              size_t count,
                              uint64_t token,
                              uint64_t deadline_ns);

// Adds a request for the device's serial: 20 bytes, padded with zeroes, into one buffer of at least 20 bytes.
// Otherwise as bareblk_push_read.
int bareblk_push_get_id(struct bareblk_queue *queue,
                        struct bareblk_range buffer,
                        uint64_t token,
                        uint64_t deadline_ns);

// First step, under the lock if the queue has one: publishes everything that was pushed to the device.
//
// Returns 1 and fills in `kick` if the device wants a notification: call bareblk_notify, without the lock. Returns 0
// if it does not; `kick` is empty then, and bareblk_notify does nothing. Or returns an error; bareblk_notify then
// does nothing either, unless `kick` was never filled in. The call overwrites a notification that `kick` holds:
// notify first.
int bareblk_prepare_kick(struct bareblk_queue *queue,
                         struct bareblk_kick *kick);

// Second step: notifies the device if it wants that, and empties `kick`. Needs no lock; never blocks.
//
// Errors: BAREBLK_ERR_INVALID: NULL, or a value that bareblk_prepare_kick did not fill in.
int bareblk_notify(struct bareblk_kick *kick);

// Both steps in one, for queues without a lock.
int bareblk_submit(struct bareblk_queue *queue);

// Takes the completions of requests that have ended, `max` at most; never waits. It also ends requests whose deadline
// has passed, sends the flush after a durable write, and notifies the device of that.
//
// Returns how many completions it stored; 0: no request has ended. Errors: BAREBLK_ERR_DISCONNECTED and
// BAREBLK_ERR_DEVICE, after the completions of all requests in flight were taken.
int bareblk_completions(struct bareblk_queue *queue,
                        struct bareblk_completion *completions,
                        size_t max);

// As bareblk_completions, but if no request has ended, it sleeps up to `limit_ns` nanoseconds (BAREBLK_FOREVER:
// without limit). Returns 0 when the time is over.
int bareblk_wait(struct bareblk_queue *queue,
                 struct bareblk_completion *completions,
                 size_t max,
                 uint64_t limit_ns);

// Asks the device to signal bareblk_completion_fd at the next completion.
//
// Returns 0: poll the descriptor now; 1: a request has ended already, and there may be no signal for it; or an error.
int bareblk_arm(struct bareblk_queue *queue);

// Returns the descriptor to poll (or epoll) for reading, after bareblk_arm, or an error. It stays the same as long as
// the queue exists. It belongs to the queue: do not close it.
int bareblk_completion_fd(struct bareblk_queue *queue);

// Clears the signal of bareblk_completion_fd. Call it after a wake-up and before bareblk_completions.
int bareblk_clear_signal(struct bareblk_queue *queue);

// Ends the requests with this token now, with BAREBLK_ERR_CANCELLED. The device does not learn of it, because
// virtio-blk has no cancellation. The device returns the buffers later, with BAREBLK_RETURNED.
//
// Errors: BAREBLK_ERR_NOT_FOUND.
int bareblk_cancel(struct bareblk_queue *queue, uint64_t token);

// Reads `count` bytes (a multiple of 512) from `sector` (of 512 bytes) on, copied through the pool. It sleeps until
// the read is done, at most `limit_ns` nanoseconds (BAREBLK_FOREVER: without limit), and only works on a queue
// without other requests in flight (else BAREBLK_ERR_BUSY). `out` must not lie in the pool or in registered memory.
//
// Returns 0 or an error: those of bareblk_push_read, and those of completions. After an error, `out` may be filled in
// part.
int bareblk_read_blocking(struct bareblk_queue *queue,
                          uint64_t sector,
                          void *out,
                          size_t count,
                          uint64_t limit_ns);

// Writes `count` bytes (a multiple of 512) to `sector` on. `flags`: BAREBLK_DURABLE, or 0: durable after the next
// flush. Otherwise as bareblk_read_blocking. After an error, a part may have been written.
int bareblk_write_blocking(struct bareblk_queue *queue,
                           uint64_t sector,
                           const void *data,
                           size_t count,
                           uint32_t flags,
                           uint64_t limit_ns);

// Makes all writes durable that completed before. Otherwise as bareblk_read_blocking.
int bareblk_flush_blocking(struct bareblk_queue *queue, uint64_t limit_ns);

// Discards segments as bareblk_push_discard does, and waits as bareblk_read_blocking does.
int bareblk_discard_blocking(struct bareblk_queue *queue,
                             const struct bareblk_segment *segments,
                             size_t count,
                             uint64_t limit_ns);

// Zeroes segments as bareblk_push_write_zeroes does, and waits as bareblk_read_blocking does.
int bareblk_write_zeroes_blocking(struct bareblk_queue *queue,
                                  const struct bareblk_segment *segments,
                                  size_t count,
                                  uint64_t limit_ns);

// Stores the device's serial: BAREBLK_ID_BYTES bytes, padded with zeroes; a serial of that length has no NUL at its
// end. `count` is the room at `id`, at least BAREBLK_ID_BYTES. Otherwise as bareblk_read_blocking.
int bareblk_get_id_blocking(struct bareblk_queue *queue,
                            void *id,
                            size_t count,
                            uint64_t limit_ns);

// Returns the version of the loaded library, in the format of BAREBLK_VERSION.
uint32_t bareblk_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BAREBLK_DRIVER_H */
