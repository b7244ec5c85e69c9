/*
 * bareblk_driver.h: a virtio-blk driver in user space, for any vhost-user-blk socket.
 *
 *     bareblk_connect -> bareblk_push_* ... -> bareblk_submit -> bareblk_wait ... -> bareblk_disconnect
 *
 * Made from the sources of crates/driver/blk_driver_capi; changes go there. docs/how-to/driver-in-c.md has an example.
 *
 * Results. Calls that return int return a negative bareblk_code for an error, and 0 or what they say otherwise; then
 * bareblk_last_error() has a line of text. Every call looks for NULL and at lengths; no call ends the program.
 *
 * Units. A sector has 512 bytes, whatever the device's block size. Everything else has its unit in its name. Times are
 * nanoseconds from now on; BAREBLK_FOREVER is no limit.
 *
 * Threads. One thread at a time uses a queue; which one may change, and a lock of the program's own will do for several.
 * A device and a buffer may be used by several threads at once; a bareblk_kick by any thread, once. What frees a handle
 * is its last use.
 *
 * Ownership. Handles are freed by the call that their description names, in any order. What a pointer points to is the
 * caller's, and is read or written during the call only; an object that is written must not be used by anybody else
 * meanwhile. Buffers of requests are the exception: they are the device's until their request has ended, and, if it
 * ended with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED, until BAREBLK_RETURNED has come for it.
 *
 * Growth. Structures that may grow come with their size: sizeof of the type, as the program knows it. A program that
 * was compiled with an older header gets what it knows; one with a newer header finds zeroes in what the library does
 * not know, and an error if it asks for that.
 */


#ifndef BAREBLK_DRIVER_H
#define BAREBLK_DRIVER_H

#include <stddef.h>
#include <stdint.h>

// A time limit or deadline that never comes.
#define BAREBLK_FOREVER UINT64_MAX

// For bareblk_options.packed: split rings.
#define BAREBLK_PACKED_NO 0

// For bareblk_options.packed: packed rings, and an error if the device has none.
#define BAREBLK_PACKED_YES 1

// For bareblk_options.packed: whichever suits the device.
#define BAREBLK_PACKED_ANY 2

// For bareblk_options.in_flight_log: where the device has one, if reconnect_ns is not 0.
#define BAREBLK_LOG_ANY 0

// For bareblk_options.in_flight_log: none.
#define BAREBLK_LOG_NO 1

// For bareblk_options.in_flight_log: one, and an error if the device has none.
#define BAREBLK_LOG_YES 2

// bareblk_event.kind: the configuration changed (a resize, say); bareblk_device_info has the new one.
#define BAREBLK_EVENT_CONFIG_CHANGED 1

// bareblk_event.kind: the back-end went away.
#define BAREBLK_EVENT_DISCONNECTED 2

// bareblk_event.kind: it is back; the counts say what was done.
#define BAREBLK_EVENT_RECONNECTED 3

// bareblk_event.kind: it did not come back, and is waited for no more; the reason says why. The last event.
#define BAREBLK_EVENT_GAVE_UP 4

// Bytes of bareblk_event.reason.
#define BAREBLK_REASON_BYTES 256

// A write completes when it is durable.
#define BAREBLK_DURABLE 1

// The blocks of a segment to be zeroed may be given back.
#define BAREBLK_UNMAP 1

// Bytes of a device's serial.
#define BAREBLK_ID_BYTES 20

// Version of this header: major << 16 | minor << 8 | patch.
#define BAREBLK_VERSION 256

// What became of a call or a request. Negative ones are errors.
typedef enum bareblk_code {
    // Done.
    BAREBLK_OK = 0,
    // Only in completions, and no end of a request: the device let go of the buffers of a request that had ended with
    // BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED.
    BAREBLK_RETURNED = 1,
    // An argument: NULL, a length, a value without meaning; or a request that no device takes (half a sector, an empty
    // buffer, too many buffers).
    BAREBLK_ERR_INVALID = -1,
    // The queue is full: take completions first.
    BAREBLK_ERR_FULL = -2,
    // A buffer that is not in the pool or in registered memory; or no memory is registered at this address.
    BAREBLK_ERR_NOT_REGISTERED = -3,
    // The device does not offer this request.
    BAREBLK_ERR_NOT_OFFERED = -4,
    // The device is read-only.
    BAREBLK_ERR_READ_ONLY = -5,
    // No connection could be made.
    BAREBLK_ERR_CONNECT = -6,
    // No memory: the pool is exhausted, or the kernel or the back-end does not take it.
    BAREBLK_ERR_MEMORY = -7,
    // The back-end is gone and will not be waited for. The queue takes no more requests.
    BAREBLK_ERR_DISCONNECTED = -8,
    // The device broke the ring. The queue takes no more requests.
    BAREBLK_ERR_DEVICE = -9,
    // The kernel refused something.
    BAREBLK_ERR_SYSTEM = -10,
    // A blocking call on a queue with requests in flight.
    BAREBLK_ERR_BUSY = -11,
    // No request in flight has this token.
    BAREBLK_ERR_NOT_FOUND = -12,
    // The device reports an I/O error.
    BAREBLK_ERR_IO = -20,
    // The device does not support the request.
    BAREBLK_ERR_UNSUPPORTED = -21,
    // The device answered with a status that has no meaning.
    BAREBLK_ERR_BAD_STATUS = -22,
    // The device stored less than a successful read must (only after bareblk_queue_refuse_short_reads).
    BAREBLK_ERR_SHORT_READ = -23,
    // The device did not answer before the deadline. The buffers are still with the device.
    BAREBLK_ERR_DEADLINE = -24,
    // Cancelled. The buffers are still with the device.
    BAREBLK_ERR_CANCELLED = -25,
    // The device is gone; whether the request was done is unknown.
    BAREBLK_ERR_LOST = -26,
    // A bug in this library. The handle that it happened with takes no more calls but the one that frees it.
    BAREBLK_ERR_BUG = -99,
} bareblk_code;

// A part of a device's pool. Any thread may use it, several at once. It outlives its device.
typedef struct bareblk_buffer bareblk_buffer;

// A session with a back-end. Any thread may use it, several at once, until bareblk_disconnect.
typedef struct bareblk_device bareblk_device;

// One queue of a device. One thread uses it at a time; which one may change. It outlives bareblk_disconnect: requests
// in flight then end with BAREBLK_ERR_LOST, and can be taken.
typedef struct bareblk_queue bareblk_queue;

// How to connect. Made by bareblk_options_init, changed by the caller. It may grow at its end in later versions of
// this library: struct_size says which version the caller was compiled with.
typedef struct bareblk_options {
    // Bytes of this structure, set by bareblk_options_init.
    uint32_t struct_size;
    // Queues to use; more than the device has is an error. Initially 1.
    uint16_t queues;
    // Descriptors per queue, a power of two. Initially 256.
    uint16_t queue_size;
    // Memory for buffers, in bytes, rounded up to pages. Initially 16 MiB.
    uint64_t pool_bytes;
    // How long connecting, and each message to the back-end, may take, in nanoseconds. Initially 5 s.
    uint64_t timeout_ns;
    // When the back-end goes away: how long to wait for the next one, in nanoseconds. Initially 0: not at all.
    uint64_t reconnect_ns;
    // BAREBLK_PACKED_NO, _YES, or _ANY. Initially the latter.
    uint8_t packed;
    // 1: use indirect descriptors if offered (initially). 0: do not.
    uint8_t indirect;
    // 1: use EVENT_IDX if offered (initially). 0: do not.
    uint8_t event_idx;
    // 1: the pool is of 2 MiB pages, which must be reserved (vm.nr_hugepages). 0: it is not (initially).
    uint8_t huge_pages;
    // Have the back-end note what it has begun, for its successor to do again: BAREBLK_LOG_ANY (initially), _NO, or _YES.
    uint32_t in_flight_log;
} bareblk_options;

// What the device says about itself (virtio 1.3 §5.2.4). It may grow at its end in later versions of this library.
typedef struct bareblk_info {
    // In sectors of 512 bytes.
    uint64_t capacity_sectors;
    // Virtio features that both sides agreed on.
    uint64_t features;
    // vhost-user protocol features that both sides agreed on.
    uint64_t protocol_features;
    // Of a logical block, in bytes.
    uint32_t block_size_bytes;
    // Buffers per request.
    uint32_t max_segments;
    // Segments per discard; 0: there is no discard.
    uint32_t max_discard_segments;
    // Sectors in each of them.
    uint32_t max_discard_sectors;
    // Segments per write of zeroes; 0: there is none.
    uint32_t max_write_zeroes_segments;
    // Sectors in each of them.
    uint32_t max_write_zeroes_sectors;
    // Queues that it has.
    uint16_t num_queues;
    // 1: it accepts no writes.
    uint8_t read_only;
    // 1: it has a cache to flush.
    uint8_t flush;
    // 0.
    uint32_t reserved;
} bareblk_info;

// Something that happened to a device. It may grow at its end in later versions of this library. Kinds without a meaning
// to a program are to be ignored by it.
typedef struct bareblk_event {
    // One of BAREBLK_EVENT_*.
    uint32_t kind;
    // BAREBLK_EVENT_RECONNECTED: how often it was tried.
    uint32_t attempts;
    // BAREBLK_EVENT_RECONNECTED: how long the device was away, in nanoseconds.
    uint64_t away_ns;
    // BAREBLK_EVENT_RECONNECTED: requests that were sent again. None if kept_rings.
    uint64_t resubmitted;
    // BAREBLK_EVENT_RECONNECTED: requests found completed in the old ring. None if kept_rings.
    uint64_t completed;
    // BAREBLK_EVENT_RECONNECTED: queues whose owners had not called by then; their requests are not in the two counts
    // before, and are sent again when they call.
    uint32_t owners_waited_for;
    // BAREBLK_EVENT_RECONNECTED: 1 if the queues go on with the rings that they had, and the back-end does again what its
    // predecessor had begun (bareblk_options.in_flight_log). Else 0.
    uint32_t kept_rings;
    // BAREBLK_EVENT_GAVE_UP: one line, ended with NUL. Else empty.
    char reason[256];
} bareblk_event;

// Counters since the queue was made.
typedef struct bareblk_stats {
    // Requests taken.
    uint64_t pushed;
    // Requests ended.
    uint64_t completed;
    // Notifications that the device wanted.
    uint64_t kicks;
    // Batches made visible to the device.
    uint64_t publications;
    // Times that the queue's owner went to sleep for a completion.
    uint64_t sleeps;
} bareblk_stats;

// One buffer of a request: a part of the pool or of registered memory.
typedef struct bareblk_range {
    // In the pool: bareblk_buffer_addr, plus an offset. In registered memory: the pointer, (uintptr_t) pointer.
    uint64_t addr;
    // Its length in bytes, at most UINT32_MAX.
    uint64_t len_bytes;
} bareblk_range;

// One run of sectors for discard and write-zeroes.
typedef struct bareblk_segment {
    // First sector of 512 bytes.
    uint64_t sector;
    // How many.
    uint32_t sectors;
    // Write-zeroes only: BAREBLK_UNMAP, or 0.
    uint32_t flags;
} bareblk_segment;

// A notification that the device asked for and has not had yet, or nothing. Made by bareblk_prepare_kick, ended by
// bareblk_notify, once: a copy of this structure is the same notification, of which one is used and the other
// forgotten. It may be used by any thread, and after its queue or device is gone. As long as it is not given, the
// device may sleep, and others who push meanwhile are told that no notification is needed.
typedef struct bareblk_kick {
    // Of this library.
    size_t opaque[4];
} bareblk_kick;

// How a request ended. Each ends exactly once; one that ended with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED is
// followed by exactly one BAREBLK_RETURNED, from when on its buffers are its owner's again.
typedef struct bareblk_completion {
    // As given.
    uint64_t token;
    // What became of it: a bareblk_code.
    int32_t status;
    // Bytes of data that the device says it stored: those of a read or of an id.
    uint32_t stored_bytes;
    // With BAREBLK_ERR_BAD_STATUS: the status byte. Else 0.
    uint32_t detail;
    // 0.
    uint32_t reserved;
} bareblk_completion;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// What a code means, in a few words; never NULL. For the status of completions; bareblk_last_error says more about
// calls that failed. The text lives as long as the program.
const char *bareblk_code_text(int32_t code);

// One line about the last call of this thread that returned an error; empty if none has. Calls that succeed leave it
// alone. It is valid until the next error of the same thread, or the thread's end; at most 511 bytes of UTF-8.
const char *bareblk_last_error(void);

// Fills in what is usual. struct_size: sizeof (bareblk_options).
//
// Errors: BAREBLK_ERR_INVALID.
int bareblk_options_init(struct bareblk_options *options, size_t struct_size);

// Connects to a vhost-user-blk socket, negotiates, shares memory and starts the queues.
//
// `options`: NULL for the usual ones. `queues`: room for `queues_len` handles, at least as many as the options ask for
// (1 in the usual ones); the rest of them becomes NULL. The caller owns what is stored: each queue goes with
// bareblk_queue_free, the device with bareblk_disconnect, in any order.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_CONNECT; then there is NULL everywhere.
int bareblk_connect(const char *socket_path,
                    const struct bareblk_options *options,
                    struct bareblk_device **device,
                    struct bareblk_queue **queues,
                    size_t queues_len);

// Stores what the device said last. struct_size: sizeof (bareblk_info).
int bareblk_device_info(const struct bareblk_device *device, struct bareblk_info *info, size_t struct_size);

// The back-end's process, as the socket names it; 0 if it is not visible from here, or an error.
int bareblk_peer_pid(const struct bareblk_device *device);

// Lets requests use memory of the caller's own: `len_bytes` from `offset_bytes` (a multiple of the page size) on of a
// file (a memfd) that the caller has mapped at `addr` with MAP_SHARED. Requests name it by its pointers.
//
// The descriptor stays the caller's and may be closed afterwards. This library and the back-end map the file
// themselves: the caller's mapping gives the addresses, and may go without bareblk_unregister.
//
// Errors: BAREBLK_ERR_INVALID, BAREBLK_ERR_MEMORY, BAREBLK_ERR_SYSTEM.
int bareblk_register(const struct bareblk_device *device,
                     int fd,
                     uint64_t offset_bytes,
                     const void *addr,
                     uint64_t len_bytes);

// Takes back the memory that was registered at `addr`. No request that uses it may be in flight; later ones are
// refused. When this returns, the back-end has let go of it, or is gone.
//
// Errors: BAREBLK_ERR_NOT_REGISTERED, BAREBLK_ERR_MEMORY.
int bareblk_unregister(const struct bareblk_device *device,
                       const void *addr);

// Ends the session and frees its handle, within the time limits of two messages. Requests in flight end with
// BAREBLK_ERR_LOST; their queues' handles stay, and so do buffers. A back-end that hangs, or answers too early, may
// still store into the buffers of reads that were lost: who wants them again takes all completions first. NULL is
// nothing to do.
void bareblk_disconnect(struct bareblk_device *device);

// Stores the next event, waiting up to `limit_ns` nanoseconds for one (0: not at all; BAREBLK_FOREVER: without limit).
// struct_size: sizeof (bareblk_event). Several threads may wait; each event goes to one of them.
//
// Returns 1; or 0 if the time is up, with a kind of 0 stored; or an error.
int bareblk_next_event(const struct bareblk_device *device,
                       struct bareblk_event *event,
                       size_t struct_size,
                       uint64_t limit_ns);

// Readable while there are events; for poll and epoll. It belongs to the device: do not close it. Or an error.
int bareblk_event_fd(const struct bareblk_device *device);

// Takes `len_bytes` from the pool, aligned to 4096; what is in it is what was there. The caller owns it, until
// bareblk_buffer_release.
//
// Returns 0 or an error: BAREBLK_ERR_MEMORY, BAREBLK_ERR_INVALID; then there is NULL.
int bareblk_buffer_take(const struct bareblk_device *device,
                        uint32_t len_bytes,
                        struct bareblk_buffer **buffer);

// For bareblk_range: the buffer's address as the device knows it, not a pointer. 0 for NULL.
uint64_t bareblk_buffer_addr(const struct bareblk_buffer *buffer);

// The buffer's bytes in this process. The device may change them at any moment while a request names them. NULL for
// NULL.
void *bareblk_buffer_data(const struct bareblk_buffer *buffer);

// Copies `count` bytes into the buffer, from its byte `offset_bytes` on. `data` must not lie in the pool.
int bareblk_buffer_write(const struct bareblk_buffer *buffer,
                         uint32_t offset_bytes,
                         const void *data,
                         size_t count);

// Copies `count` bytes out of the buffer, from its byte `offset_bytes` on. `out` must not lie in the pool.
int bareblk_buffer_read(const struct bareblk_buffer *buffer, uint32_t offset_bytes, void *out, size_t count);

// Gives the buffer back to the pool: the next one who takes it may be somebody else, so no request in flight may name
// it (a request that ended with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED does until BAREBLK_RETURNED; after
// BAREBLK_ERR_LOST see bareblk_disconnect). NULL is nothing to do.
void bareblk_buffer_release(struct bareblk_buffer *buffer);

// Its index at the device, or an error.
int bareblk_queue_index(struct bareblk_queue *queue);

// Its size in descriptors, or an error.
int bareblk_queue_size(struct bareblk_queue *queue);

// Requests taken and not yet ended (one that ended while its buffers are with the device counts), or an error.
int bareblk_queue_in_flight(struct bareblk_queue *queue);

// How many requests of `buffers` buffers each can be pushed now, or an error.
int bareblk_queue_room(struct bareblk_queue *queue, uint16_t buffers);

// From now on a read that the device calls done, with fewer bytes stored than were asked for, ends with
// BAREBLK_ERR_SHORT_READ (`refuse` = 1), or is believed (0; initially, because some devices do not say how much they
// stored). bareblk_completion.stored_bytes tells in both cases.
int bareblk_queue_refuse_short_reads(struct bareblk_queue *queue,
                                     int refuse);

// The earliest deadline of a request in flight, for programs that sleep by themselves (on bareblk_completion_fd): only
// a call of bareblk_completions ends a request that is late.
//
// Returns 1 and stores the nanoseconds until then, or 0 if no request has a deadline, or an error.
int bareblk_queue_next_deadline(struct bareblk_queue *queue,
                                uint64_t *left_ns);

// Stores the counters. struct_size: sizeof (bareblk_stats).
int bareblk_queue_stats(struct bareblk_queue *queue, struct bareblk_stats *stats, size_t struct_size);

// Ends the use of a queue. What is in flight is given up: the device may use its buffers until it is disconnected.
// NULL is nothing to do.
void bareblk_queue_free(struct bareblk_queue *queue);

// Takes a read: from `sector` (of 512 bytes) on into `count` buffers, a multiple of 512 bytes in all. The device sees
// it after the next bareblk_prepare_kick or bareblk_submit.
//
// `token` comes back in the completion. `deadline_ns`, from now on: if the device has not answered then, the request
// ends with BAREBLK_ERR_DEADLINE; BAREBLK_FOREVER: no deadline. The list of buffers is copied; the buffers themselves
// are the device's until the request has ended (after BAREBLK_ERR_DEADLINE and BAREBLK_ERR_CANCELLED: until
// BAREBLK_RETURNED).
//
// Errors: BAREBLK_ERR_FULL, BAREBLK_ERR_NOT_REGISTERED, BAREBLK_ERR_INVALID, and those of a queue that has ended:
// BAREBLK_ERR_DISCONNECTED, BAREBLK_ERR_DEVICE. The queue is as it was then.
int bareblk_push_read(struct bareblk_queue *queue,
                      uint64_t sector,
                      const struct bareblk_range *buffers,
                      size_t count,
                      uint64_t token,
                      uint64_t deadline_ns);

// Takes a write: from `count` buffers to `sector` on. `flags`: BAREBLK_DURABLE, or 0: durable after the next flush.
// Otherwise as bareblk_push_read; also BAREBLK_ERR_READ_ONLY.
int bareblk_push_write(struct bareblk_queue *queue,
                       uint64_t sector,
                       const struct bareblk_range *buffers,
                       size_t count,
                       uint32_t flags,
                       uint64_t token,
                       uint64_t deadline_ns);

// Takes a flush: everything that completed before becomes durable. Otherwise as bareblk_push_read.
int bareblk_push_flush(struct bareblk_queue *queue, uint64_t token, uint64_t deadline_ns);

// Takes a discard: the device may forget what is in `count` segments (at most bareblk_info.max_discard_segments), whose
// flags are 0. Otherwise as bareblk_push_read; also BAREBLK_ERR_NOT_OFFERED, BAREBLK_ERR_READ_ONLY.
int bareblk_push_discard(struct bareblk_queue *queue,
                         const struct bareblk_segment *segments,
                         size_t count,
                         uint64_t token,
                         uint64_t deadline_ns);

// Takes a write of zeroes: `count` segments (at most bareblk_info.max_write_zeroes_segments) read as zeroes afterwards.
// Otherwise as bareblk_push_discard.
int bareblk_push_write_zeroes(struct bareblk_queue *queue,
                              const struct bareblk_segment *segments,
                              size_t count,
                              uint64_t token,
                              uint64_t deadline_ns);

// Takes a question for the device's serial: 20 bytes, padded with zeroes, into one buffer of at least as many.
// Otherwise as bareblk_push_read.
int bareblk_push_get_id(struct bareblk_queue *queue,
                        struct bareblk_range buffer,
                        uint64_t token,
                        uint64_t deadline_ns);

// First step, where the queue is (under the lock, if it has one): makes everything pushed visible to the device.
//
// Returns 1 and fills in `kick` if the device wants to be notified, which takes bareblk_notify, without the lock. 0 if
// it does not; `kick` holds nothing then, and notifying is harmless. Or an error; notifying is harmless then too, unless
// `kick` was never filled in. What it held before is forgotten: notify first.
int bareblk_prepare_kick(struct bareblk_queue *queue,
                         struct bareblk_kick *kick);

// Second step: notifies the device, if it wanted that, and leaves nothing in `kick`. Needs no lock; never blocks.
//
// Errors: BAREBLK_ERR_INVALID: NULL, or not what bareblk_prepare_kick fills in.
int bareblk_notify(struct bareblk_kick *kick);

// Both steps in one, for queues without a lock.
int bareblk_submit(struct bareblk_queue *queue);

// Takes what has ended, `max` at most; never waits. It also ends requests whose deadline has passed, and sends the
// flush after a durable write (and notifies the device of that).
//
// Returns how many were stored; 0: nothing has ended. Errors: BAREBLK_ERR_DISCONNECTED and BAREBLK_ERR_DEVICE, after
// everything in flight was handed out.
int bareblk_completions(struct bareblk_queue *queue,
                        struct bareblk_completion *completions,
                        size_t max);

// As bareblk_completions, but sleeps up to `limit_ns` nanoseconds (BAREBLK_FOREVER: without limit) if nothing has
// ended; 0 when the time is up.
int bareblk_wait(struct bareblk_queue *queue,
                 struct bareblk_completion *completions,
                 size_t max,
                 uint64_t limit_ns);

// Asks the device to signal bareblk_completion_fd at the next completion.
//
// Returns 0: poll it now; 1: something has ended already, for which no signal may come; or an error.
int bareblk_arm(struct bareblk_queue *queue);

// The descriptor to poll (or epoll) for reading, after bareblk_arm; the same one as long as the queue lives, to whom it
// belongs: do not close it. Or an error.
int bareblk_completion_fd(struct bareblk_queue *queue);

// Takes the signal off bareblk_completion_fd, after it woke somebody and before bareblk_completions.
int bareblk_clear_signal(struct bareblk_queue *queue);

// Ends the requests with this token now, with BAREBLK_ERR_CANCELLED. The device is not asked (virtio-blk has no
// cancellation): their buffers come back later, with BAREBLK_RETURNED.
//
// Errors: BAREBLK_ERR_NOT_FOUND.
int bareblk_cancel(struct bareblk_queue *queue,
                   uint64_t token);

// Reads `count` bytes (a multiple of 512) from `sector` (of 512 bytes) on, copied through the pool. It sleeps until
// that is done, at most `limit_ns` nanoseconds (BAREBLK_FOREVER: without limit), and only works on a queue without other
// requests in flight (BAREBLK_ERR_BUSY). `out` must not lie in the pool or in registered memory.
//
// Returns 0 or an error: those of pushing, and of completions. `out` may be partly filled then.
int bareblk_read_blocking(struct bareblk_queue *queue,
                          uint64_t sector,
                          void *out,
                          size_t count,
                          uint64_t limit_ns);

// Writes `count` bytes (a multiple of 512) to `sector` on. `flags`: BAREBLK_DURABLE, or 0: durable after the next flush.
// Otherwise as bareblk_read_blocking. After an error a part may have been written.
int bareblk_write_blocking(struct bareblk_queue *queue,
                           uint64_t sector,
                           const void *data,
                           size_t count,
                           uint32_t flags,
                           uint64_t limit_ns);

// Makes everything durable that completed before. Otherwise as bareblk_read_blocking.
int bareblk_flush_blocking(struct bareblk_queue *queue, uint64_t limit_ns);

// bareblk_push_discard, as bareblk_read_blocking.
int bareblk_discard_blocking(struct bareblk_queue *queue,
                             const struct bareblk_segment *segments,
                             size_t count,
                             uint64_t limit_ns);

// bareblk_push_write_zeroes, as bareblk_read_blocking.
int bareblk_write_zeroes_blocking(struct bareblk_queue *queue,
                                  const struct bareblk_segment *segments,
                                  size_t count,
                                  uint64_t limit_ns);

// Stores the device's serial: BAREBLK_ID_BYTES bytes, padded with zeroes; if it has as many, no NUL follows. `count` is
// the room at `id`, at least as many. Otherwise as bareblk_read_blocking.
int bareblk_get_id_blocking(struct bareblk_queue *queue,
                            void *id,
                            size_t count,
                            uint64_t limit_ns);

// Version of the library that is running: as BAREBLK_VERSION.
uint32_t bareblk_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BAREBLK_DRIVER_H */
