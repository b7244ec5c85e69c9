/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * The ioctls of /dev/vhost-blk that are not in <linux/vhost.h>.
 *
 * Each ioctl needs an owner (VHOST_SET_OWNER) and works only for that owner.
 */
#ifndef VHOST_BLK_H
#define VHOST_BLK_H

#include <linux/ioctl.h>
#include <linux/types.h>
#include <linux/vhost.h>

#define VHOST_BLK_MAX_QUEUES	32
#define VHOST_BLK_SERIAL_BYTES	20

/*
 * Claims the block device of this file descriptor for the disk, and gives the
 * earlier one back; -1 only gives back.  Running queues finish their requests
 * first.  With a new device they then go on; with -1 they stop.
 *
 * EBUSY: another user has claimed the device.  EACCES: the descriptor does
 * not allow what the disk needs.  ENOTBLK: it is no block device.
 */
#define VHOST_BLK_SET_BACKEND	_IOW(VHOST_VIRTIO, 0xE0, __s32)

/*
 * Starts all queues that have a ring.  Each queue starts at the ring's used
 * index, whatever VHOST_SET_VRING_BASE said, and signals its call eventfd once.
 */
#define VHOST_BLK_START		_IO(VHOST_VIRTIO, 0xE1)

/* Stops all queues, and returns when no request is in flight. */
#define VHOST_BLK_STOP		_IO(VHOST_VIRTIO, 0xE2)

/* Reads the device's size again; the answer is in sectors of 512 bytes. */
#define VHOST_BLK_RESIZE	_IOR(VHOST_VIRTIO, 0xE3, __u64)

/* Sets the answer to VIRTIO_BLK_T_GET_ID. */
#define VHOST_BLK_SET_SERIAL	_IOW(VHOST_VIRTIO, 0xE4, \
				     __u8[VHOST_BLK_SERIAL_BYTES])

/* The guest may not write.  Set it before VHOST_BLK_SET_BACKEND if the
 * descriptor is open for reading only.
 */
#define VHOST_BLK_READ_ONLY	(1U << 0)
/* Each write is durable when it ends, as if the driver had no FLUSH. */
#define VHOST_BLK_WRITE_THROUGH	(1U << 1)

/* Sets the disk's flags.  It waits for the requests in flight. */
#define VHOST_BLK_SET_FLAGS	_IOW(VHOST_VIRTIO, 0xE5, __u32)

/* The number of requests that a workqueue had to finish, because their worker
 * was killed.  It counts for all disks since the module was loaded.
 */
#define VHOST_BLK_RESCUED	_IOR(VHOST_VIRTIO, 0xE6, __u64)

#endif
