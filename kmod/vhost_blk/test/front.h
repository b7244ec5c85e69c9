/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A front-end of /dev/vhost-blk for tests: rings and buffers in its own memory.
 *
 * Guest addresses start at GUEST_BASE.  The memory table has two regions, so
 * that a buffer can cross from one to the other.
 */
#ifndef FRONT_H
#define FRONT_H

#include <linux/vhost.h>
#include <linux/virtio_blk.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "../vhost_blk.h"

/* Headers of older distributions lack these. */
#ifndef VHOST_NEW_WORKER
struct vhost_worker_state {
	unsigned int worker_id;
};

struct vhost_vring_worker {
	unsigned int index;
	unsigned int worker_id;
};

#define VHOST_NEW_WORKER _IOR(VHOST_VIRTIO, 0x8, struct vhost_worker_state)
#define VHOST_FREE_WORKER _IOW(VHOST_VIRTIO, 0x9, struct vhost_worker_state)
#define VHOST_ATTACH_VRING_WORKER _IOW(VHOST_VIRTIO, 0x15, struct vhost_vring_worker)
#define VHOST_GET_VRING_WORKER _IOWR(VHOST_VIRTIO, 0x16, struct vhost_vring_worker)
#endif
#ifndef VHOST_SET_FORK_FROM_OWNER
#define VHOST_SET_FORK_FROM_OWNER _IOW(VHOST_VIRTIO, 0x84, __u8)
#endif

#define GUEST_BASE	0x100000000ULL
#define MEM_BYTES	(32UL << 20)
#define RING_BYTES	(64UL << 10)
#define RING_NUM	256
#define SLOT_BYTES	64UL
#define SLOTS_AT	(2UL << 20)
#define TABLES_AT	(3UL << 20)
#define DATA_AT		(4UL << 20)
#define DATA_BYTES	(MEM_BYTES - DATA_AT)
#define SECTOR		512UL

#define USUAL_FEATURES	(1ULL << VIRTIO_F_VERSION_1 | \
			 1ULL << VIRTIO_RING_F_INDIRECT_DESC | \
			 1ULL << VIRTIO_BLK_F_FLUSH)
#define EVENT_IDX	(1ULL << VIRTIO_RING_F_EVENT_IDX)

struct part {
	uint64_t addr;
	uint32_t len;
	uint16_t flags;
};

struct ring {
	struct vring v;
	int kick, call, err;
	uint16_t avail, used;
	uint16_t free, nr_free;
	uint16_t next[RING_NUM];
	unsigned int in_flight;
};

struct front {
	int fd;
	uint8_t *mem;
	unsigned int nq;
	bool event_idx;
	struct ring rings[VHOST_BLK_MAX_QUEUES];
};

/* The end of a test; harness.c. */
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
#define CHECK(condition, ...) do { if (!(condition)) fail(__VA_ARGS__); } while (0)

/* Front-end; front.c. */
uint8_t *front_memory(void);
void front_fds(struct front *f, unsigned int nq);
void front_rings(struct front *f, bool fresh);
void front_open(struct front *f, uint8_t *mem, unsigned int nq, uint64_t features);
void front_setup(struct front *f, unsigned int nq, uint64_t features, bool fresh);
void front_new(struct front *f, unsigned int nq, uint64_t features, const char *disk);
int front_table(struct front *f, uint8_t *mem);
int front_backend(struct front *f, const char *disk);
void front_workers(struct front *f, unsigned int workers, uint32_t *ids);
int open_disk(const char *disk, int flags);

uint64_t at(size_t offset);
int put_chain(struct front *f, unsigned int q, const struct part *parts,
	      unsigned int n, bool indirect);
void kick(struct front *f, unsigned int q);
void kick_always(struct front *f, unsigned int q);
int reap(struct front *f, unsigned int q, uint32_t *len);
int reap_wait(struct front *f, unsigned int q, uint32_t *len);
bool event_within(int fd, int ms);

/* Requests: header and status are in the slot of the chain's head. */
uint8_t *status_of(struct front *f, unsigned int q, int head);
int start_parts(struct front *f, unsigned int q, uint32_t type, uint64_t sector,
		const struct part *data, unsigned int n, bool indirect);
int start(struct front *f, unsigned int q, uint32_t type, uint64_t sector,
	  size_t offset, uint32_t len);
int finish(struct front *f, unsigned int q, int head, uint32_t *len);
int request(struct front *f, unsigned int q, uint32_t type, uint64_t sector,
	    size_t offset, uint32_t len);

void fill(uint8_t *data, uint64_t sector, size_t bytes, uint32_t generation);
bool holds(const uint8_t *data, uint64_t sector, size_t bytes, uint32_t generation);
void disk_read(const char *disk, uint64_t sector, void *to, size_t bytes);

/* Tests. */
struct test {
	const char *name;
	void (*run)(void);
};
extern const struct test data_tests[], hostile_tests[], life_tests[], kill_tests[];
extern const char *disk_under_test;

#endif
