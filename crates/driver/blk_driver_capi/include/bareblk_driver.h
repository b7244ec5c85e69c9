/*
 * bareblk_driver.h: a virtio-blk driver in user space for vhost-user-blk sockets.
 *
 *     bareblk_connect -> bareblk_push_* ... -> bareblk_submit -> bareblk_wait ... -> bareblk_disconnect
 *
 * Generated from the sources in crates/driver/blk_driver_capi: edit those. docs/how-to/driver-in-c.md has an example.
 *
 * Return values. A function that returns int returns a negative bareblk_code if it fails. Otherwise it returns 0, or
 * the value that its description names. After a failure, bareblk_last_error() describes it in one line.
 * BAREBLK_ERR_INVALID stands for all invalid arguments: pointers that are misaligned, or NULL although the description
 * does not allow that; values out of range; undefined flags. Every function that takes a handle can also return
 * BAREBLK_ERR_BUG. No function ends the program, except that the program aborts if malloc has no memory. errno has no
 * meaning after a call.
 *
 * Units. A sector has 512 bytes, whatever the device's block size is. The names of sizes and times, or their
 * descriptions, state the unit. A time that is passed to a function counts from the call; BAREBLK_FOREVER means no
 * limit.
 *
 * Threads. Only one thread at a time may use a queue: a program that shares a queue between threads holds a lock of its
 * own during each call. Any number of threads may use a device or a buffer at once. Any thread may send a bareblk_kick,
 * but only once. While a handle is being freed, no other call may use it, and no later call may use it either. Do not
 * call this library in signal handlers, and do not use its handles in a forked child.
 *
 * Ownership. The description of each type of handle names the function that frees it. Handles may be freed in any
 * order. The caller owns all other objects that it passes pointers to, and a function accesses them only until it
 * returns. While a function writes to an object, no other thread may access the object. The buffers of requests are an
 * exception: they belong to the device until their request has ended. If it ended with BAREBLK_ERR_DEADLINE or
 * BAREBLK_ERR_CANCELLED, they belong to the device until the completion with BAREBLK_RETURNED.
 *
 * Versions. Structures to which later versions may add fields are passed with their size, sizeof of the type. A program
 * that was compiled with an older header gets the fields that it knows. A program that was compiled with a newer header
 * gets zeroes in the fields that the library does not know, and BAREBLK_ERR_INVALID if it sets such a field.
 */


#ifndef BAREBLK_DRIVER_H
#define BAREBLK_DRIVER_H

#include <stddef.h>
#include <stdint.h>

// A time limit or deadline that never passes.
#define BAREBLK_FOREVER UINT64_MAX

// bareblk_options.packed: use split rings.
#define BAREBLK_PACKED_NO 0

// bareblk_options.packed: use packed rings; connecting fails if the device does not offer them.
#define BAREBLK_PACKED_YES 1

// bareblk_options.packed: let the library choose. This version uses split rings, which every device offers.
#define BAREBLK_PACKED_ANY 2

// bareblk_options.in_flight_log: use a log if the back-end offers one and reconnect_ns is not 0.
#define BAREBLK_LOG_ANY 0

// bareblk_options.in_flight_log: use no log.
#define BAREBLK_LOG_NO 1

// bareblk_options.in_flight_log: use a log; connecting fails if the back-end does not offer one.
#define BAREBLK_LOG_YES 2

// bareblk_event.kind: the device's configuration changed, for example by a resize. bareblk_device_info returns the new
// configuration.
#define BAREBLK_EVENT_CONFIG_CHANGED 1

// bareblk_event.kind: the back-end disconnected.
#define BAREBLK_EVENT_DISCONNECTED 2

// bareblk_event.kind: a back-end is connected again. The fields from attempts to kept_rings say what the driver did.
#define BAREBLK_EVENT_RECONNECTED 3

// bareblk_event.kind: the driver no longer tries to reconnect; bareblk_event.reason says why. No event follows this
// one.
#define BAREBLK_EVENT_GAVE_UP 4

// Size of bareblk_event.reason in bytes.
#define BAREBLK_REASON_BYTES 256

// Flag of a write: the write completes only when its data is durable.
#define BAREBLK_DURABLE 1

// Flag of a segment of a write-zeroes: the device may deallocate the sectors.
#define BAREBLK_UNMAP 1

// Size of a device's serial in bytes.
#define BAREBLK_ID_BYTES 20

// Version of this header, as major << 16 | minor << 8 | patch.
#define BAREBLK_VERSION 512

// The result of a function or of a request. Values below 0 are errors.
typedef enum bareblk_code {
    // Success.
    BAREBLK_OK = 0,
    // Only in completions: the device no longer uses the buffers of a request that had ended with BAREBLK_ERR_DEADLINE
    // or BAREBLK_ERR_CANCELLED. The request does not end a second time.
    BAREBLK_RETURNED = 1,
    // An argument is invalid: NULL, misaligned, out of range, or with undefined flags. Or the request is one that no
    // device accepts: its data is not a multiple of 512 bytes, a buffer is empty, or there are too many buffers or
    // segments.
    BAREBLK_ERR_INVALID = -1,
    // The queue is full. Take completions, then push the request again.
    BAREBLK_ERR_FULL = -2,
    // A buffer is neither in the pool nor in registered memory. For bareblk_unregister: no memory is registered at
    // this address.
    BAREBLK_ERR_NOT_REGISTERED = -3,
    // The device does not offer this type of request (bareblk_info says so).
    BAREBLK_ERR_NOT_OFFERED = -4,
    // The device is read-only.
    BAREBLK_ERR_READ_ONLY = -5,
    // Connecting to the back-end, or negotiating with it, failed.
    BAREBLK_ERR_CONNECT = -6,
    // The pool has no contiguous free memory of this size; the kernel or the back-end refused the memory; or the
    // back-end disconnected before it accepted the memory.
    BAREBLK_ERR_MEMORY = -7,
    // The back-end disconnected, and the driver no longer tries to reconnect. The queue accepts no more requests.
    BAREBLK_ERR_DISCONNECTED = -8,
    // The device broke the rules of the virtqueue. The queue accepts no more requests.
    BAREBLK_ERR_DEVICE = -9,
    // A system call failed.
    BAREBLK_ERR_SYSTEM = -10,
    // A blocking function was called on a queue with requests in flight.
    BAREBLK_ERR_BUSY = -11,
    // No request in flight has this token.
    BAREBLK_ERR_NOT_FOUND = -12,
    // The device reported an I/O error (VIRTIO_BLK_S_IOERR).
    BAREBLK_ERR_IO = -20,
    // The device does not support the request (VIRTIO_BLK_S_UNSUPP).
    BAREBLK_ERR_UNSUPPORTED = -21,
    // The device returned a status byte that virtio-blk does not define; bareblk_completion.detail has the byte.
    BAREBLK_ERR_BAD_STATUS = -22,
    // The device reported success, but stored fewer bytes than the read requested (only after
    // bareblk_queue_refuse_short_reads).
    BAREBLK_ERR_SHORT_READ = -23,
    // The device did not complete the request before its deadline. It may still use the buffers.
    BAREBLK_ERR_DEADLINE = -24,
    // The program cancelled the request. The device may still use the buffers.
    BAREBLK_ERR_CANCELLED = -25,
    // The back-end disconnected, or the device broke the rules of the virtqueue. It is unknown whether the device
    // carried out the request.
    BAREBLK_ERR_LOST = -26,
    // A bug in this library; standard error has a description. If the call was on a queue, all later calls on it fail
    // with this code, and only bareblk_queue_free remains.
    BAREBLK_ERR_BUG = -99,
} bareblk_code;

// A buffer from a device's pool. Any number of threads may use it at once. It may outlive its device. Freed by
// bareblk_buffer_release.
typedef struct bareblk_buffer bareblk_buffer;

// A connection to a back-end. Any number of threads may use it at once. Freed by bareblk_disconnect.
typedef struct bareblk_device bareblk_device;

// A queue of a device. Only one thread at a time may use it. It stays valid after bareblk_disconnect: requests in
// flight end with BAREBLK_ERR_LOST, and the program can still take their completions. Freed by bareblk_queue_free.
typedef struct bareblk_queue bareblk_queue;

// How to connect. Call bareblk_options_init first, then change fields. Later versions of this library may add fields
// at the end; struct_size says which fields the caller was compiled with.
typedef struct bareblk_options {
    // Size of this structure in bytes, set by bareblk_options_init.
    uint32_t struct_size;
    // Number of queues to use. Connecting fails if the device has fewer. Default: 1.
    uint16_t queues;
    // Descriptors per queue: a power of two from 2 to 1024. Default: 256.
    uint16_t queue_size;
    // Size of the pool of buffers in bytes, rounded up to whole pages. Default: 16 MiB.
    uint64_t pool_bytes;
    // Time limit for connecting, and for each message to the back-end, in nanoseconds. Default: 5 s.
    uint64_t timeout_ns;
    // How long to try to reconnect after the back-end disconnected, in nanoseconds; 0: do not reconnect. Default: 0.
    uint64_t reconnect_ns;
    // BAREBLK_PACKED_NO, BAREBLK_PACKED_YES or BAREBLK_PACKED_ANY. Default: BAREBLK_PACKED_ANY.
    uint8_t packed;
    // 1: use indirect descriptors if the device offers them. 0: do not. Default: 1.
    uint8_t indirect;
    // 1: use VIRTIO_F_EVENT_IDX if the device offers it. 0: do not. Default: 1.
    uint8_t event_idx;
    // 1: the pool uses pages of 2 MiB, which must be reserved (sysctl vm.nr_hugepages). 0: it uses ordinary pages.
    // Default: 0.
    uint8_t huge_pages;
    // Whether the back-end logs its requests in flight in memory that outlives it, so that the next back-end can
    // repeat them: BAREBLK_LOG_ANY, BAREBLK_LOG_NO or BAREBLK_LOG_YES. Default: BAREBLK_LOG_ANY.
    uint32_t in_flight_log;
} bareblk_options;

// The device's configuration (virtio 1.3 §5.2.4) and the result of the negotiation. Later versions of this library may
// add fields at the end.
typedef struct bareblk_info {
    // Size of the disk, in sectors of 512 bytes.
    uint64_t capacity_sectors;
    // The negotiated virtio features, as a bit mask.
    uint64_t features;
    // The negotiated vhost-user protocol features, as a bit mask.
    uint64_t protocol_features;
    // Logical block size, in bytes.
    uint32_t block_size_bytes;
    // Maximum number of buffers in a request.
    uint32_t max_segments;
    // Maximum number of segments in a discard; 0 if the device does not offer discard.
    uint32_t max_discard_segments;
    // Maximum number of sectors in a segment of a discard.
    uint32_t max_discard_sectors;
    // Maximum number of segments in a write-zeroes; 0 if the device does not offer write-zeroes.
    uint32_t max_write_zeroes_segments;
    // Maximum number of sectors in a segment of a write-zeroes.
    uint32_t max_write_zeroes_sectors;
    // Number of queues of the device.
    uint16_t num_queues;
    // 1 if the device is read-only; otherwise 0.
    uint8_t read_only;
    // 1 if the device has a write cache, so that a write is durable only after a flush; otherwise 0.
    uint8_t flush;
    // Always 0.
    uint32_t reserved;
} bareblk_info;

// A change of a device's connection or configuration. Later versions of this library may add kinds, and fields at the
// end: ignore unknown kinds.
typedef struct bareblk_event {
    // One of BAREBLK_EVENT_*; 0: no event.
    uint32_t kind;
    // For BAREBLK_EVENT_RECONNECTED: number of attempts to connect. Otherwise 0.
    uint32_t attempts;
    // For BAREBLK_EVENT_RECONNECTED: how long the device was disconnected, in nanoseconds. Otherwise 0.
    uint64_t away_ns;
    // For BAREBLK_EVENT_RECONNECTED: number of requests that the driver sent again; 0 if kept_rings is 1.
    uint64_t resubmitted;
    // For BAREBLK_EVENT_RECONNECTED: number of requests that the driver found completed in the old ring; 0 if
    // kept_rings is 1.
    uint64_t completed;
    // For BAREBLK_EVENT_RECONNECTED: number of queues on which the program made no call within a second after the
    // reconnect. The driver sends their requests again at the next call on the queue; resubmitted and completed do not
    // include them.
    uint32_t owners_waited_for;
    // For BAREBLK_EVENT_RECONNECTED: 1 if the queues keep their rings, and the new back-end repeats the requests that
    // the old one had started (bareblk_options.in_flight_log). Otherwise 0.
    uint32_t kept_rings;
    // For BAREBLK_EVENT_GAVE_UP: one line of text with a NUL at its end. Otherwise empty.
    char reason[256];
} bareblk_event;

// Counters of a queue since bareblk_connect. Later versions of this library may add fields at the end.
typedef struct bareblk_stats {
    // Number of requests that the queue accepted.
    uint64_t pushed;
    // Number of requests that ended.
    uint64_t completed;
    // Number of notifications that the device requested.
    uint64_t kicks;
    // Number of batches of requests that were made visible to the device.
    uint64_t publications;
    // How often a call slept to wait for a completion.
    uint64_t sleeps;
} bareblk_stats;

// A buffer of a request: a part of the pool or of registered memory.
typedef struct bareblk_range {
    // In the pool: bareblk_buffer_addr plus an offset. In registered memory: the pointer as an integer, (uintptr_t)
    // pointer.
    uint64_t addr;
    // Length in bytes, from 1 to UINT32_MAX.
    uint64_t len_bytes;
} bareblk_range;

// A range of sectors, for discard and write-zeroes.
typedef struct bareblk_segment {
    // First sector, in units of 512 bytes.
    uint64_t sector;
    // Number of sectors of 512 bytes.
    uint32_t sectors;
    // Write-zeroes: BAREBLK_UNMAP or 0. Discard: 0.
    uint32_t flags;
} bareblk_segment;

// A notification that the device requested and that has not been sent yet, or none. bareblk_prepare_kick fills it in;
// bareblk_notify sends it and empties it. Zeroed memory is an empty bareblk_kick.
//
// Any thread may send it, even after the queue and the device were freed. It holds resources until it is sent, so send
// each notification exactly once: of a structure and its copies, pass only one to bareblk_notify. Send it soon: until
// then the device may sleep, and bareblk_prepare_kick reports to other threads that the device needs no notification.
typedef struct bareblk_kick {
    // Private to this library.
    size_t opaque[4];
} bareblk_kick;

// How a request ended. Each request ends exactly once. If it ended with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED,
// exactly one more completion with BAREBLK_RETURNED follows; from then on, the buffers belong to the program again.
typedef struct bareblk_completion {
    // The request's token.
    uint64_t token;
    // The result: a bareblk_code.
    int32_t status;
    // For a read or a request for the serial: number of bytes that the device reported as stored.
    uint32_t stored_bytes;
    // If status is BAREBLK_ERR_BAD_STATUS, the status byte; otherwise 0.
    uint32_t detail;
    // Always 0.
    uint32_t reserved;
} bareblk_completion;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns a short description of a bareblk_code, for example of bareblk_completion.status. The result is never NULL,
// not even for unknown codes. The string is static. After a call that failed, bareblk_last_error has more detail.
const char *bareblk_code_text(int32_t code);

// Returns one line of text about this thread's last call that failed; an empty string if none has failed. Calls that
// succeed do not change the text. The string is UTF-8 of at most 511 bytes with a NUL at its end, and belongs to the
// library: it is valid until the next failing call of the same thread, or until the thread ends.
const char *bareblk_last_error(void);

// Fills in the default options. `struct_size`: sizeof (bareblk_options).
//
// Returns 0 or an error: BAREBLK_ERR_INVALID.
int bareblk_options_init(struct bareblk_options *options, size_t struct_size);

// Connects to the vhost-user-blk socket at the path `socket_path`, negotiates features, shares memory with the
// back-end and starts the queues. Also starts a thread that serves the connection until bareblk_disconnect.
//
// `options`: NULL for the default options. `device`: receives the device's handle. `queues`: receives one handle per
// queue; it has room for `queues_len` handles, at least bareblk_options.queues. The call sets the remaining handles to
// NULL. The caller owns all handles: it frees each queue with bareblk_queue_free and the device with
// bareblk_disconnect, in any order.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_CONNECT. After an error, all handles are NULL.
int bareblk_connect(const char *socket_path,
                    const struct bareblk_options *options,
                    struct bareblk_device **device,
                    struct bareblk_queue **queues,
                    size_t queues_len);

// Stores the device's latest configuration in `info`. `struct_size`: sizeof (bareblk_info).
//
// Returns 0 or an error: BAREBLK_ERR_INVALID.
int bareblk_device_info(const struct bareblk_device *device, struct bareblk_info *info, size_t struct_size);

// Returns the process id of the back-end as the socket reports it (SO_PEERCRED: the process that called listen); 0 if
// that process has no id in this PID namespace; or an error: BAREBLK_ERR_INVALID.
int bareblk_peer_pid(const struct bareblk_device *device);

// Lets requests use the program's own memory: `len_bytes` bytes of the file `fd` (a memfd, for example) from
// `offset_bytes` on, which the program has mapped at `addr` with MAP_SHARED. `offset_bytes` must be a multiple of the
// page size. In a bareblk_range, such memory is addressed by its pointer.
//
// The caller keeps `fd` and may close it when the call has returned. The library and the back-end have their own
// mappings of the file: the program's mapping only defines the addresses, and the program may unmap it before
// bareblk_unregister.
//
// The call waits until the back-end has mapped the memory. While the driver tries to reconnect, the call succeeds, and
// the next back-end gets the memory when it connects.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_MEMORY, BAREBLK_ERR_SYSTEM.
int bareblk_register(const struct bareblk_device *device,
                     int fd,
                     uint64_t offset_bytes,
                     const void *addr,
                     uint64_t len_bytes);

// Removes the memory that was registered at `addr`. No request in flight may use it; later requests that use it are
// refused. When the call returns 0, the back-end has unmapped the memory or has disconnected.
//
// Returns 0 or an error: BAREBLK_ERR_NOT_REGISTERED, BAREBLK_ERR_MEMORY.
int bareblk_unregister(const struct bareblk_device *device,
                       const void *addr);

// Ends the connection and frees the device's handle; waits for at most two messages to the back-end, each limited by
// bareblk_options.timeout_ns. NULL has no effect.
//
// Requests in flight end with BAREBLK_ERR_LOST. The handles of queues and buffers stay valid, and the program can
// still take the completions. A back-end that hangs, or answers too early, may still store into the buffers of reads:
// take all completions before you use those buffers again.
void bareblk_disconnect(struct bareblk_device *device);

// Takes the oldest event and stores it in `event`; waits up to `limit_ns` nanoseconds for one (0: does not wait;
// BAREBLK_FOREVER: no limit). `struct_size`: sizeof (bareblk_event). Several threads may wait at once; each event goes
// to one of them. The library keeps at most 64 events. Beyond that, it drops the oldest change of the configuration,
// or the oldest event if there is no such change.
//
// Returns 1 if it stored an event; 0 if there was none in time (`kind` is 0 then); or an error: BAREBLK_ERR_INVALID.
int bareblk_next_event(const struct bareblk_device *device,
                       struct bareblk_event *event,
                       size_t struct_size,
                       uint64_t limit_ns);

// Returns a file descriptor that is readable while there are events, for poll and epoll; or an error:
// BAREBLK_ERR_INVALID. The descriptor belongs to the device: do not read from it, and do not close it.
int bareblk_event_fd(const struct bareblk_device *device);

// Takes a buffer of `len_bytes` bytes from the device's pool and stores its handle in `buffer`. The buffer is aligned
// to 4096 bytes. Its contents are not cleared. The caller owns it until bareblk_buffer_release.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_MEMORY. After an error, the handle is NULL.
int bareblk_buffer_take(const struct bareblk_device *device,
                        uint32_t len_bytes,
                        struct bareblk_buffer **buffer);

// Returns the buffer's address for bareblk_range.addr. It is the address by which the device knows the buffer, not a
// pointer. Returns 0 if `buffer` is NULL.
uint64_t bareblk_buffer_addr(const struct bareblk_buffer *buffer);

// Returns a pointer to the buffer's bytes, valid until bareblk_buffer_release. While a request uses the buffer, the
// device may read and change the bytes at any moment. Returns NULL if `buffer` is NULL.
void *bareblk_buffer_data(const struct bareblk_buffer *buffer);

// Copies `count` bytes from `data` into the buffer, starting at its byte `offset_bytes`. `data` must not be in the
// pool.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID, for example because the bytes do not fit into the buffer.
int bareblk_buffer_write(const struct bareblk_buffer *buffer,
                         uint32_t offset_bytes,
                         const void *data,
                         size_t count);

// Copies `count` bytes from the buffer, from its byte `offset_bytes` on, to `out`. `out` must not be in the pool.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID, for example because the buffer has fewer bytes.
int bareblk_buffer_read(const struct bareblk_buffer *buffer,
                        uint32_t offset_bytes,
                        void *out,
                        size_t count);

// Returns the buffer to the pool and frees its handle. NULL has no effect. The device must no longer use the buffer,
// because the pool may hand it out again at once: no request in flight may use it, and a request that ended with
// BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED must have had its BAREBLK_RETURNED. For BAREBLK_ERR_LOST, see
// bareblk_disconnect.
void bareblk_buffer_release(struct bareblk_buffer *buffer);

// Returns the queue's index on the device, counted from 0; or an error: BAREBLK_ERR_INVALID.
int bareblk_queue_index(struct bareblk_queue *queue);

// Returns the queue's size in descriptors; or an error: BAREBLK_ERR_INVALID.
int bareblk_queue_size(struct bareblk_queue *queue);

// Returns the number of requests in flight: those that the queue accepted and whose completion was not taken yet, and
// those that ended with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED and have no BAREBLK_RETURNED yet. On failure,
// returns an error: BAREBLK_ERR_INVALID.
int bareblk_queue_in_flight(struct bareblk_queue *queue);

// Returns how many requests with `buffers` buffers each the queue accepts now; or an error: BAREBLK_ERR_INVALID.
int bareblk_queue_room(struct bareblk_queue *queue,
                       uint16_t buffers);

// Sets how a read ends if the device reports success although it stored fewer bytes than requested. If `refuse` is 0,
// the read ends with BAREBLK_OK; this is the default, because some devices do not report how much they stored. With
// any other value, it ends with BAREBLK_ERR_SHORT_READ. In both cases, bareblk_completion.stored_bytes has the number
// of bytes that the device reported.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID.
int bareblk_queue_refuse_short_reads(struct bareblk_queue *queue,
                                     int refuse);

// Stores in `left_ns` the time until the earliest deadline of the requests in flight, in nanoseconds: 0 if the
// deadline has passed, BAREBLK_FOREVER if no request has one. For programs that wait on bareblk_completion_fd: a
// request ends at its deadline only in a call of bareblk_completions or bareblk_wait, so wake up in time to make that
// call. The earliest deadline may be that of a request that has just ended.
//
// Returns 1 if there is a deadline; 0 if there is none; or an error: BAREBLK_ERR_INVALID.
int bareblk_queue_next_deadline(struct bareblk_queue *queue,
                                uint64_t *left_ns);

// Stores the queue's counters in `stats`. `struct_size`: sizeof (bareblk_stats).
//
// Returns 0 or an error: BAREBLK_ERR_INVALID.
int bareblk_queue_stats(struct bareblk_queue *queue, struct bareblk_stats *stats, size_t struct_size);

// Frees the queue's handle. NULL has no effect. Requests in flight get no completion, and the device may use their
// buffers until bareblk_disconnect has returned.
void bareblk_queue_free(struct bareblk_queue *queue);

// Adds a read to the queue. It reads from `sector` on (in units of 512 bytes) into `count` buffers (from 1 to
// bareblk_info.max_segments), whose lengths must add up to a multiple of 512 bytes. The device does not see the
// request before the next bareblk_prepare_kick or bareblk_submit. The device, not this function, checks whether the
// sectors exist.
//
// `token`: any value; the completion repeats it. `deadline_ns`: a time from now, in nanoseconds; if the device has not
// completed the request by then, the request ends with BAREBLK_ERR_DEADLINE. BAREBLK_FOREVER: no deadline.
//
// The call copies the array `buffers`. The buffers themselves belong to the device until the request has ended; if it
// ends with BAREBLK_ERR_DEADLINE or BAREBLK_ERR_CANCELLED, until its BAREBLK_RETURNED.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_FULL, BAREBLK_ERR_NOT_REGISTERED; on a queue that cannot
// continue, BAREBLK_ERR_DISCONNECTED or BAREBLK_ERR_DEVICE. After an error, the queue is unchanged, and there will be
// no completion.
int bareblk_push_read(struct bareblk_queue *queue,
                      uint64_t sector,
                      const struct bareblk_range *buffers,
                      size_t count,
                      uint64_t token,
                      uint64_t deadline_ns);

// Adds a write to the queue. It writes `count` buffers to the sectors from `sector` on. `flags`: BAREBLK_DURABLE, or 0
// for a write that is durable only after the next flush. Otherwise like bareblk_push_read; the errors also include
// BAREBLK_ERR_READ_ONLY.
int bareblk_push_write(struct bareblk_queue *queue,
                       uint64_t sector,
                       const struct bareblk_range *buffers,
                       size_t count,
                       uint32_t flags,
                       uint64_t token,
                       uint64_t deadline_ns);

// Adds a flush to the queue. It makes durable all writes that completed before it. On a device without a write cache,
// it ends at once. Otherwise like bareblk_push_read.
int bareblk_push_flush(struct bareblk_queue *queue,
                       uint64_t token,
                       uint64_t deadline_ns);

// Adds a discard to the queue: the device may drop the contents of the `count` segments (from 1 to
// bareblk_info.max_discard_segments), whose flags must be 0. The call copies the array `segments`. Otherwise like
// bareblk_push_read; the errors also include BAREBLK_ERR_NOT_OFFERED and BAREBLK_ERR_READ_ONLY.
int bareblk_push_discard(struct bareblk_queue *queue,
                         const struct bareblk_segment *segments,
                         size_t count,
                         uint64_t token,
                         uint64_t deadline_ns);

// Adds a write-zeroes to the queue: the `count` segments (from 1 to bareblk_info.max_write_zeroes_segments) read as
// zeroes once it has completed. Otherwise like bareblk_push_discard.
int bareblk_push_write_zeroes(struct bareblk_queue *queue,
                              const struct bareblk_segment *segments,
                              size_t count,
                              uint64_t token,
                              uint64_t deadline_ns);

// Adds a request for the device's serial to the queue. The device stores BAREBLK_ID_BYTES bytes in `buffer`, padded
// with zeroes; a serial of that length has no NUL at its end. `buffer` must have at least BAREBLK_ID_BYTES bytes.
// Otherwise like bareblk_push_read.
int bareblk_push_get_id(struct bareblk_queue *queue,
                        struct bareblk_range buffer,
                        uint64_t token,
                        uint64_t deadline_ns);

// First step of a submission: makes all pushed requests visible to the device and stores in `kick` whether the device
// must be notified. If several threads share the queue, call it under their lock, and call bareblk_notify after the
// unlock. The call overwrites `kick` without reading it: a notification in it that was not sent is lost.
//
// Returns 1 if the device must be notified: call bareblk_notify. Returns 0 if not; `kick` is empty then, and
// bareblk_notify has no effect. On failure, returns an error: BAREBLK_ERR_INVALID; `kick` is unchanged or empty then.
int bareblk_prepare_kick(struct bareblk_queue *queue,
                         struct bareblk_kick *kick);

// Second step of a submission: sends the notification in `kick`, if there is one, and empties `kick`. Needs no lock
// and never blocks.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID, for NULL and for a value that bareblk_prepare_kick did not store.
int bareblk_notify(struct bareblk_kick *kick);

// Does both steps of a submission, bareblk_prepare_kick and bareblk_notify, for queues that are used without a lock.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID.
int bareblk_submit(struct bareblk_queue *queue);

// Stores in `completions` the completions of up to `max` requests that have ended; never waits. The call also ends
// requests whose deadline has passed. For a write with BAREBLK_DURABLE, it sends the flush that follows the write, and
// notifies the device of it.
//
// Returns the number of completions that it stored; 0 if no request has ended. On failure, returns an error:
// BAREBLK_ERR_INVALID; on a queue that cannot continue, and only after all its completions were taken,
// BAREBLK_ERR_DISCONNECTED or BAREBLK_ERR_DEVICE.
int bareblk_completions(struct bareblk_queue *queue,
                        struct bareblk_completion *completions,
                        size_t max);

// Like bareblk_completions, but if no request has ended, the call sleeps until one ends, for up to `limit_ns`
// nanoseconds (BAREBLK_FOREVER: no limit). Returns 0 if no request ended in time. A signal handler that runs meanwhile
// does not end the wait. The errors also include BAREBLK_ERR_SYSTEM.
int bareblk_wait(struct bareblk_queue *queue,
                 struct bareblk_completion *completions,
                 size_t max,
                 uint64_t limit_ns);

// Asks the device to signal bareblk_completion_fd when the next request ends, and then checks whether one has ended
// already.
//
// Returns 0 if none has: poll the descriptor. Returns 1 if bareblk_completions has something to report: call it now,
// because there may be no signal for it. On failure, returns an error: BAREBLK_ERR_INVALID.
int bareblk_arm(struct bareblk_queue *queue);

// Returns the file descriptor that becomes readable when a request ends, for poll and epoll; or an error:
// BAREBLK_ERR_INVALID. Call bareblk_arm each time before you wait on the descriptor. It stays the same as long as the
// queue exists, and belongs to the queue: do not read from it, and do not close it.
int bareblk_completion_fd(struct bareblk_queue *queue);

// Clears the signal on bareblk_completion_fd. Call it after each wake-up, before bareblk_completions; otherwise the
// descriptor stays readable.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID.
int bareblk_clear_signal(struct bareblk_queue *queue);

// Ends all requests with this token now, with BAREBLK_ERR_CANCELLED. virtio-blk has no cancellation, so the device may
// still carry them out. When the device no longer uses the buffers of such a request, a completion with
// BAREBLK_RETURNED follows.
//
// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_NOT_FOUND.
int bareblk_cancel(struct bareblk_queue *queue,
                   uint64_t token);

// Reads `count` bytes (a multiple of 512) from `sector` on (in units of 512 bytes) into `out`, and sleeps until the
// read has ended. The data is copied through the pool; `out` must not be in the pool or in registered memory.
// `limit_ns`: time limit of the call, in nanoseconds; BAREBLK_FOREVER: none. The queue must have no other requests in
// flight.
//
// Returns 0 or an error: an error of bareblk_push_read; the result of a request, from BAREBLK_ERR_IO to
// BAREBLK_ERR_LOST (BAREBLK_ERR_DEADLINE: the time limit has passed); BAREBLK_ERR_BUSY: the queue has requests in
// flight; BAREBLK_ERR_MEMORY: the pool has no room; BAREBLK_ERR_SYSTEM. After an error, `out` may be partly filled.
// After every return, `out` belongs to the caller alone.
int bareblk_read_blocking(struct bareblk_queue *queue,
                          uint64_t sector,
                          void *out,
                          size_t count,
                          uint64_t limit_ns);

// Writes `count` bytes (a multiple of 512) from `data` to the sectors from `sector` on. `flags`: BAREBLK_DURABLE, or 0
// for a write that is durable only after the next flush. Otherwise like bareblk_read_blocking; the errors also include
// BAREBLK_ERR_READ_ONLY. After an error, a part may have been written.
int bareblk_write_blocking(struct bareblk_queue *queue,
                           uint64_t sector,
                           const void *data,
                           size_t count,
                           uint32_t flags,
                           uint64_t limit_ns);

// Makes durable all writes that completed before the call. Otherwise like bareblk_read_blocking, but needs no room in
// the pool.
int bareblk_flush_blocking(struct bareblk_queue *queue,
                           uint64_t limit_ns);

// Discards segments like bareblk_push_discard, with the same errors, and waits like bareblk_read_blocking. Needs no
// room in the pool.
int bareblk_discard_blocking(struct bareblk_queue *queue,
                             const struct bareblk_segment *segments,
                             size_t count,
                             uint64_t limit_ns);

// Zeroes segments like bareblk_push_write_zeroes, with the same errors, and waits like bareblk_read_blocking. Needs no
// room in the pool.
int bareblk_write_zeroes_blocking(struct bareblk_queue *queue,
                                  const struct bareblk_segment *segments,
                                  size_t count,
                                  uint64_t limit_ns);

// Stores the device's serial in `id`: BAREBLK_ID_BYTES bytes, padded with zeroes; a serial of that length has no NUL
// at its end. `count`: size of `id` in bytes, at least BAREBLK_ID_BYTES. Otherwise like bareblk_read_blocking.
int bareblk_get_id_blocking(struct bareblk_queue *queue,
                            void *id,
                            size_t count,
                            uint64_t limit_ns);

// Returns the version of the library that the program runs with, in the format of BAREBLK_VERSION.
uint32_t bareblk_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BAREBLK_DRIVER_H */
