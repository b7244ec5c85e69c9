// SPDX-License-Identifier: GPL-2.0-only
/* A front-end of /dev/vhost-blk for tests: setup, rings, requests, patterns. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "front.h"

uint64_t at(size_t offset)
{
	return GUEST_BASE + offset;
}

uint8_t *front_memory(void)
{
	void *mem = mmap(NULL, MEM_BYTES, PROT_READ | PROT_WRITE,
			 MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	CHECK(mem != MAP_FAILED, "no memory");
	return mem;
}

int front_table(struct front *f, uint8_t *mem)
{
	struct {
		struct vhost_memory m;
		struct vhost_memory_region r[2];
	} table = { .m.nregions = 2 };
	unsigned int i;

	for (i = 0; i < 2; i++) {
		size_t half = MEM_BYTES / 2;

		table.r[i].guest_phys_addr = GUEST_BASE + i * half;
		table.r[i].memory_size = half;
		table.r[i].userspace_addr = (uintptr_t)mem + i * half;
	}
	return ioctl(f->fd, VHOST_SET_MEM_TABLE, &table);
}

int open_disk(const char *disk, int flags)
{
	int fd = open(disk, flags | O_CLOEXEC);

	CHECK(fd >= 0, "cannot open %s: %s", disk, strerror(errno));
	return fd;
}

int front_backend(struct front *f, const char *disk)
{
	int fd = open_disk(disk, O_RDWR);
	int ret = ioctl(f->fd, VHOST_BLK_SET_BACKEND, &fd);

	close(fd);
	return ret;
}

void front_fds(struct front *f, unsigned int nq)
{
	f->nq = nq;
	for (unsigned int q = 0; q < nq; q++) {
		f->rings[q].kick = eventfd(0, EFD_NONBLOCK);
		f->rings[q].call = eventfd(0, EFD_NONBLOCK);
		f->rings[q].err = eventfd(0, EFD_NONBLOCK);
	}
}

/* Empties the front-end's side; @fresh also clears the rings in memory. */
void front_rings(struct front *f, bool fresh)
{
	for (unsigned int q = 0; q < f->nq; q++) {
		struct ring *r = &f->rings[q];
		uint8_t *place = f->mem + q * RING_BYTES;

		if (fresh)
			memset(place, 0, RING_BYTES);
		vring_init(&r->v, RING_NUM, place, 4096);
		r->avail = r->v.avail->idx;
		r->used = r->v.used->idx;
		r->in_flight = 0;
		r->free = 0;
		r->nr_free = RING_NUM;
		for (int i = 0; i < RING_NUM; i++)
			r->next[i] = i + 1;
	}
}

/* Everything up to the rings; the eventfds exist. */
void front_setup(struct front *f, unsigned int nq, uint64_t features, bool fresh)
{
	f->nq = nq;
	f->event_idx = features & EVENT_IDX;
	front_rings(f, fresh);
	CHECK(!ioctl(f->fd, VHOST_SET_FEATURES, &features), "SET_FEATURES: %m");
	CHECK(!front_table(f, f->mem), "SET_MEM_TABLE: %m");
	for (unsigned int q = 0; q < nq; q++) {
		struct ring *r = &f->rings[q];
		struct vhost_vring_state state = { q, RING_NUM };
		struct vhost_vring_file file = { q, r->kick };
		struct vhost_vring_addr addr = {
			.index = q,
			.desc_user_addr = (uintptr_t)r->v.desc,
			.avail_user_addr = (uintptr_t)r->v.avail,
			.used_user_addr = (uintptr_t)r->v.used,
		};

		CHECK(!ioctl(f->fd, VHOST_SET_VRING_NUM, &state), "NUM: %m");
		/* A stale position, which must not matter. */
		state.num = 0;
		CHECK(!ioctl(f->fd, VHOST_SET_VRING_BASE, &state), "BASE: %m");
		CHECK(!ioctl(f->fd, VHOST_SET_VRING_ADDR, &addr), "ADDR: %m");
		CHECK(!ioctl(f->fd, VHOST_SET_VRING_KICK, &file), "KICK: %m");
		file.fd = r->call;
		CHECK(!ioctl(f->fd, VHOST_SET_VRING_CALL, &file), "CALL: %m");
		file.fd = r->err;
		CHECK(!ioctl(f->fd, VHOST_SET_VRING_ERR, &file), "ERR: %m");
	}
}

void front_open(struct front *f, uint8_t *mem, unsigned int nq, uint64_t features)
{
	memset(f, 0, sizeof(*f));
	f->mem = mem;
	f->fd = open("/dev/vhost-blk", O_RDWR | O_CLOEXEC);
	CHECK(f->fd >= 0, "cannot open /dev/vhost-blk: %m");
	CHECK(!ioctl(f->fd, VHOST_SET_OWNER), "SET_OWNER: %m");
	front_fds(f, nq);
	front_setup(f, nq, features, true);
}

/* A front-end whose queues run. */
void front_new(struct front *f, unsigned int nq, uint64_t features, const char *disk)
{
	front_open(f, front_memory(), nq, features);
	CHECK(!front_backend(f, disk), "SET_BACKEND %s: %m", disk);
	CHECK(!ioctl(f->fd, VHOST_BLK_START), "START: %m");
}

/* Makes workers and spreads the queues over them. */
void front_workers(struct front *f, unsigned int workers, uint32_t *ids)
{
	struct vhost_vring_worker place = { 0 };

	CHECK(!ioctl(f->fd, VHOST_GET_VRING_WORKER, &place), "GET_VRING_WORKER: %m");
	ids[0] = place.worker_id;
	for (unsigned int w = 1; w < workers; w++) {
		struct vhost_worker_state state;

		CHECK(!ioctl(f->fd, VHOST_NEW_WORKER, &state), "NEW_WORKER: %m");
		ids[w] = state.worker_id;
	}
	for (unsigned int q = 0; q < f->nq; q++) {
		place.index = q;
		place.worker_id = ids[q % workers];
		CHECK(!ioctl(f->fd, VHOST_ATTACH_VRING_WORKER, &place),
		      "ATTACH_VRING_WORKER: %m");
	}
}

static uint16_t take_desc(struct ring *r)
{
	uint16_t i = r->free;

	r->free = r->next[i];
	r->nr_free--;
	return i;
}

static void write_desc(struct vring_desc *d, const struct part *part, bool last,
		       uint16_t next)
{
	d->addr = part->addr;
	d->len = part->len;
	d->flags = part->flags | (last ? 0 : VRING_DESC_F_NEXT);
	d->next = last ? 0 : next;
}

/* Makes a chain available; returns its head, or -1 if there is no room. */
int put_chain(struct front *f, unsigned int q, const struct part *parts,
	      unsigned int n, bool indirect)
{
	struct ring *r = &f->rings[q];
	uint16_t head, i;

	if (r->nr_free < (indirect ? 1 : n))
		return -1;
	head = i = take_desc(r);
	if (indirect) {
		/* Each head has room for 16 entries, or one user for all. */
		size_t offset = TABLES_AT + (n > 16 ? 0 : (q * RING_NUM + head) * 256UL);
		struct vring_desc *table = (void *)(f->mem + offset);
		struct part whole = { at(offset), n * sizeof(*table),
				      VRING_DESC_F_INDIRECT };

		for (unsigned int k = 0; k < n; k++)
			write_desc(&table[k], &parts[k], k + 1 == n, k + 1);
		write_desc(&r->v.desc[head], &whole, true, 0);
	} else {
		for (unsigned int k = 0; k < n; k++) {
			bool last = k + 1 == n;
			uint16_t next = last ? 0 : take_desc(r);

			write_desc(&r->v.desc[i], &parts[k], last, next);
			i = next;
		}
	}
	r->v.avail->ring[r->avail % RING_NUM] = head;
	r->avail++;
	r->in_flight++;
	__atomic_store_n(&r->v.avail->idx, r->avail, __ATOMIC_RELEASE);
	return head;
}

void kick_always(struct front *f, unsigned int q)
{
	uint64_t one = 1;

	CHECK(write(f->rings[q].kick, &one, 8) == 8, "kick: %m");
}

/* Kicks if the device asks for it. */
void kick(struct front *f, unsigned int q)
{
	struct ring *r = &f->rings[q];

	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (f->event_idx) {
		uint16_t event = *(volatile uint16_t *)&vring_avail_event(&r->v);

		/* More than one chain may have been added since. */
		if ((uint16_t)(r->avail - event - 1) >= RING_NUM)
			return;
	} else if (*(volatile uint16_t *)&r->v.used->flags & VRING_USED_F_NO_NOTIFY) {
		return;
	}
	kick_always(f, q);
}

/* Takes one used entry; returns its head, or -1. */
int reap(struct front *f, unsigned int q, uint32_t *len)
{
	struct ring *r = &f->rings[q];
	uint16_t idx = __atomic_load_n(&r->v.used->idx, __ATOMIC_ACQUIRE);
	struct vring_used_elem *e;
	uint16_t i;

	CHECK((uint16_t)(idx - r->used) <= RING_NUM, "used index jumped to %u", idx);
	if (idx == r->used)
		return -1;
	e = &r->v.used->ring[r->used % RING_NUM];
	CHECK(e->id < RING_NUM, "used head %u", e->id);
	if (len)
		*len = e->len;
	r->used++;
	CHECK(r->in_flight, "a used entry without a request");
	r->in_flight--;
	if (f->event_idx) {
		*(volatile uint16_t *)&vring_used_event(&r->v) = r->used;
		__atomic_thread_fence(__ATOMIC_SEQ_CST);
	}
	for (i = e->id;; i = r->v.desc[i].next) {
		r->nr_free++;
		if (!(r->v.desc[i].flags & VRING_DESC_F_NEXT))
			break;
	}
	r->next[i] = r->free;
	for (uint16_t k = e->id; k != i; k = r->v.desc[k].next)
		r->next[k] = r->v.desc[k].next;
	r->free = e->id;
	return e->id;
}

bool event_within(int fd, int ms)
{
	struct pollfd p = { fd, POLLIN, 0 };
	uint64_t count;

	if (poll(&p, 1, ms) != 1)
		return false;
	return read(fd, &count, 8) == 8;
}

/* Waits for a used entry by its interrupt alone. */
int reap_wait(struct front *f, unsigned int q, uint32_t *len)
{
	int head = reap(f, q, len);

	while (head < 0) {
		bool event = event_within(f->rings[q].call, 15000);

		head = reap(f, q, len);
		CHECK(event || head < 0, "queue %u: interrupt lost", q);
		CHECK(event, "queue %u: %u requests do not end", q,
		      f->rings[q].in_flight);
	}
	return head;
}

static size_t slot(unsigned int q, int head)
{
	return SLOTS_AT + (q * RING_NUM + head) * SLOT_BYTES;
}

uint8_t *status_of(struct front *f, unsigned int q, int head)
{
	return f->mem + slot(q, head) + 32;
}

/* Adds header and status to the data.  The chain's head chooses their place. */
int start_parts(struct front *f, unsigned int q, uint32_t type, uint64_t sector,
		const struct part *data, unsigned int n, bool indirect)
{
	struct part parts[1100];
	int head = f->rings[q].free;
	struct virtio_blk_outhdr *header = (void *)(f->mem + slot(q, head));

	if (f->rings[q].nr_free < (indirect ? 1 : n + 2))
		return -1;
	header->type = type;
	header->ioprio = 0;
	header->sector = sector;
	*status_of(f, q, head) = 0xee;
	parts[0] = (struct part){ at(slot(q, head)), sizeof(*header), 0 };
	memcpy(parts + 1, data, n * sizeof(*data));
	parts[n + 1] = (struct part){ at(slot(q, head) + 32), 1, VRING_DESC_F_WRITE };
	return put_chain(f, q, parts, n + 2, indirect);
}

int start(struct front *f, unsigned int q, uint32_t type, uint64_t sector,
	  size_t offset, uint32_t len)
{
	bool in = type == VIRTIO_BLK_T_IN || type == VIRTIO_BLK_T_GET_ID;
	struct part data = { at(offset), len, in ? VRING_DESC_F_WRITE : 0 };

	return start_parts(f, q, type, sector, &data, len ? 1 : 0, false);
}

/* Waits for this request, which is the only one; returns its status. */
int finish(struct front *f, unsigned int q, int head, uint32_t *len)
{
	CHECK(head >= 0, "no room in the ring");
	kick(f, q);
	CHECK(reap_wait(f, q, len) == head, "another head came back");
	return *status_of(f, q, head);
}

int request(struct front *f, unsigned int q, uint32_t type, uint64_t sector,
	    size_t offset, uint32_t len)
{
	return finish(f, q, start(f, q, type, sector, offset, len), NULL);
}

static uint64_t word(uint64_t sector, unsigned int i, uint32_t generation)
{
	return (sector << 8 | i) * 0x9e3779b97f4a7c15ULL + generation;
}

void fill(uint8_t *data, uint64_t sector, size_t bytes, uint32_t generation)
{
	for (size_t done = 0; done < bytes; done += 8) {
		uint64_t w = word(sector + done / SECTOR, done % SECTOR / 8, generation);

		memcpy(data + done, &w, 8);
	}
}

bool holds(const uint8_t *data, uint64_t sector, size_t bytes, uint32_t generation)
{
	for (size_t done = 0; done < bytes; done += 8) {
		uint64_t w = word(sector + done / SECTOR, done % SECTOR / 8, generation);

		if (memcmp(data + done, &w, 8))
			return false;
	}
	return true;
}

/* Reads without the page cache and without the module. */
void disk_read(const char *disk, uint64_t sector, void *to, size_t bytes)
{
	int fd = open_disk(disk, O_RDONLY | O_DIRECT);
	void *page;

	CHECK(!posix_memalign(&page, 4096, bytes), "no memory");
	CHECK(pread(fd, page, bytes, sector * SECTOR) == (ssize_t)bytes,
	      "pread %s: %m", disk);
	memcpy(to, page, bytes);
	free(page);
	close(fd);
}
