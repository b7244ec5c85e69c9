/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Declarations that the module's files share.
 *
 * main.c: the character device and its ioctls.
 * queue.c: rings; takes requests, returns them, starts, stops and drains.
 * start.c: checks a chain and starts its request.
 * request.c: turns a request into bios, one after the other.
 *
 * Locks: vhost_dev.mutex, then vhost_worker.mutex, then vhost_virtqueue.mutex.
 * A queue's mutex protects the ring and everything in struct vblk_queue except
 * @done.  The interrupt handler of a bio takes no lock.
 */
#ifndef VHOST_BLK_INTERNAL_H
#define VHOST_BLK_INTERNAL_H

#include <linux/blkdev.h>
#include <linux/llist.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/uio.h>
#include <linux/virtio_blk.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "vhost.h"
#include "vhost_blk.h"

/* A request has at most one bio in flight, of at most this many pages. */
#define VBLK_WINDOW_PAGES	256
#define VBLK_BOUNCE_PAGES	64
/* A queue takes no more requests while it has this much in flight.  The pages
 * also bound how often one page can be pinned: 32 queues * 8192 pages, times
 * the 1024 that a pin adds to a page's reference count, is 2^28.
 */
#define VBLK_QUEUE_REQUESTS	1024
#define VBLK_QUEUE_PAGES	8192
#define VBLK_MAX_BYTES		SZ_1G
#define VBLK_MAX_RANGES		256
/* After this much a worker turns to its other queues. */
#define VBLK_WEIGHT		256
#define VBLK_BYTE_WEIGHT	SZ_16M

struct vblk_disk;

struct vblk_queue {
	struct vhost_virtqueue vq;
	struct vblk_disk *disk;
	/* Requests whose bio has ended; any context may add to it. */
	struct llist_head done;
	/* Handles @done on the queue's vhost worker, ... */
	struct vhost_work reap;
	/* ... or on the workqueue, if the worker has been killed. */
	struct work_struct rescue;
	unsigned int in_flight;
	unsigned int pages;
	/* There are used entries that the driver has not been told about. */
	bool signal;
	/* The queue has left requests in the ring because of a limit. */
	bool starved;
	/* The ring is faulty.  The queue is idle until it is started again. */
	bool broken;
};

struct vblk_disk {
	struct vhost_dev dev;
	struct vhost_virtqueue *vqs[VHOST_BLK_MAX_QUEUES];
	struct vblk_queue *queues[VHOST_BLK_MAX_QUEUES];
	/* The fields below change only under dev.mutex, with drained queues;
	 * @capacity may also change while they run.
	 */
	struct file *bdev_file;
	struct block_device *bdev;
	u64 capacity;
	u32 flags;
	bool running;
	u8 serial[VHOST_BLK_SERIAL_BYTES];
	/* Woken when a queue has no request in flight any more. */
	wait_queue_head_t drained;
};

struct vblk_request {
	struct llist_node node;
	struct vblk_queue *queue;
	struct block_device *bdev;
	u8 __user *status;
	u32 type;
	u16 head;
	bool bounced;
	/* A bio is or was in flight, and its pages are not released yet. */
	bool in_window;
	/* Zeroes are written as data. */
	bool write_zero_pages;
	/* Data are written with FUA. */
	bool fua;
	/* A flush follows when everything else has ended. */
	bool flush_last;
	blk_status_t error;
	/* What remains to be done; for ranges, of the current range. */
	sector_t sector;
	u64 left;
	/* Bytes of the bio in flight. */
	u32 window;
	/* Bytes written to the driver. */
	u32 written;
	/* Guest memory for the data that remain. */
	struct iov_iter iter;
	struct virtio_blk_discard_write_zeroes *ranges;
	unsigned int nr_ranges;
	unsigned int range;
	struct page **pages;
	unsigned int max_pages;
	unsigned int nr_pages;
	struct iovec iov[];
};

/*
 * Access to the memory of a process that is being killed can fail although
 * the memory is there.  Such a failure says nothing about the request; the
 * workqueue, which gets no signals, tries again.
 */
static inline bool vblk_dying(void)
{
	return !(current->flags & PF_KTHREAD) && fatal_signal_pending(current);
}

/* queue.c */
extern struct workqueue_struct *vblk_rescue_wq;
extern atomic64_t vblk_rescued;
struct vblk_queue *vblk_queue_new(struct vblk_disk *disk);
int vblk_queue_start(struct vblk_queue *q);
void vblk_queue_stop(struct vblk_queue *q);
void vblk_drain(struct vblk_disk *disk);
void vblk_ended(struct vblk_request *req);
int vblk_return(struct vblk_queue *q, u16 head, u8 __user *status, u8 value,
		u32 written);

/* start.c */
struct vblk_chain {
	struct iovec *out;
	struct iovec *in;
	unsigned int nr_out;
	unsigned int nr_in;
	size_t out_bytes;
	size_t in_bytes;
	u16 head;
	u8 __user *status;
};

int vblk_request_start(struct vblk_queue *q, struct vblk_chain *chain);

/* request.c */
int vblk_next_window(struct vblk_request *req);
int vblk_request_go_on(struct vblk_request *req);
u8 vblk_request_status(const struct vblk_request *req);
void vblk_request_free(struct vblk_request *req);

static inline size_t vblk_pages_of(const struct iovec *iov)
{
	size_t offset = offset_in_page(iov->iov_base);

	return DIV_ROUND_UP(offset + iov->iov_len, PAGE_SIZE);
}

/* Makes the range with the number @range the current one. */
static inline void vblk_load_range(struct vblk_request *req)
{
	const struct virtio_blk_discard_write_zeroes *range =
		&req->ranges[req->range];

	req->sector = le64_to_cpu(range->sector);
	req->left = (u64)le32_to_cpu(range->num_sectors) << SECTOR_SHIFT;
}

#endif
