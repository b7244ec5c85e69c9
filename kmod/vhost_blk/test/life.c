// SPDX-License-Identifier: GPL-2.0-only
/* Changes under load: workers, back-ends, memory, size; and faulty disks. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "front.h"

#define FAST	"/dev/nb-fast"
#define OTHER	"/dev/nb-other"
#define SLOW	"/dev/nb-slow"
#define BLOCK4K	"/dev/nb-4k"
#define LOOP	"/dev/loop0"
#define QUEUES	4
#define DEPTH	8
#define CHUNK	8192UL
#define OK	VIRTIO_BLK_S_OK
#define IOERR	VIRTIO_BLK_S_IOERR

/* The thread that changes something; it ends the load when it is done. */
static struct front front;
static volatile bool changing;
static unsigned long served;

static size_t place(unsigned int q, int i)
{
	return DATA_AT + (q * DEPTH + i) * CHUNK;
}

/* Reads sectors with a known pattern at full depth, until the change ends. */
static void load(void *(*change)(void *), uint8_t *view)
{
	int heads[QUEUES][RING_NUM];
	struct front *f = &front;
	pthread_t thread;
	unsigned int q;
	int i, head;

	served = 0;
	changing = true;
	CHECK(!pthread_create(&thread, NULL, change, f), "no thread");
	for (q = 0; q < QUEUES; q++) {
		for (i = 0; i < DEPTH; i++) {
			head = start(f, q, VIRTIO_BLK_T_IN, i * 64, place(q, i), CHUNK);
			CHECK(head >= 0, "no room");
			heads[q][head] = i;
		}
		kick(f, q);
	}
	for (q = 0; f->rings[0].in_flight + f->rings[1].in_flight +
		    f->rings[2].in_flight + f->rings[3].in_flight; q = (q + 1) % QUEUES) {
		if (!f->rings[q].in_flight)
			continue;
		head = reap_wait(f, q, NULL);
		i = heads[q][head];
		CHECK(*status_of(f, q, head) == OK, "status %u", *status_of(f, q, head));
		CHECK(holds(view + place(q, i), i * 64, CHUNK, 5), "wrong data");
		served++;
		if (!changing)
			continue;
		memset(view + place(q, i), 0, CHUNK);
		head = start(f, q, VIRTIO_BLK_T_IN, i * 64, place(q, i), CHUNK);
		heads[q][head] = i;
		kick(f, q);
	}
	pthread_join(thread, NULL);
}

/* Puts the pattern that load() expects on a disk. */
static void prepare(const char *disk)
{
	static uint8_t page[CHUNK] __attribute__((aligned(4096)));
	int fd = open_disk(disk, O_RDWR | O_DIRECT);

	for (int i = 0; i < DEPTH; i++) {
		fill(page, i * 64, CHUNK, 5);
		CHECK(pwrite(fd, page, CHUNK, i * 64 * SECTOR) == CHUNK, "pwrite %s: %m", disk);
	}
	close(fd);
}

static uint32_t ids[4];

static void *move_workers(void *arg)
{
	struct front *f = arg;

	for (int i = 0; i < 200; i++) {
		struct vhost_vring_worker place = { i % QUEUES, ids[(i * 7 + i / 5) % 4] };

		CHECK(!ioctl(f->fd, VHOST_ATTACH_VRING_WORKER, &place), "ATTACH: %m");
		usleep(500);
	}
	changing = false;
	return NULL;
}

static void workers(void)
{
	prepare(FAST);
	front_new(&front, QUEUES, USUAL_FEATURES | EVENT_IDX, FAST);
	front_workers(&front, 4, ids);
	load(move_workers, front.mem);
	CHECK(served > 500, "only %lu requests under load", served);
}

static void *swap_disks(void *arg)
{
	struct front *f = arg;
	int none = -1;

	for (int i = 0; i < 40; i++) {
		CHECK(!front_backend(f, i % 2 ? FAST : OTHER), "swap: %m");
		usleep(2000);
		if (i % 4)
			continue;
		CHECK(!ioctl(f->fd, VHOST_BLK_SET_BACKEND, &none), "removal: %m");
		for (unsigned int q = 0; q < QUEUES; q++) {
			struct vhost_vring_state state = { q, 0 };
			uint16_t used = f->rings[q].v.used->idx;

			CHECK(!ioctl(f->fd, VHOST_GET_VRING_BASE, &state), "GET_VRING_BASE: %m");
			CHECK(state.num == used, "base %u but used index %u", state.num, used);
			usleep(1000);
			CHECK(used == f->rings[q].v.used->idx, "a removed disk serves");
		}
		CHECK(!front_backend(f, FAST), "SET_BACKEND: %m");
		CHECK(!ioctl(f->fd, VHOST_BLK_START), "START: %m");
	}
	changing = false;
	return NULL;
}

static void backends(void)
{
	prepare(FAST);
	prepare(OTHER);
	front_new(&front, QUEUES, USUAL_FEATURES, FAST);
	front_workers(&front, 2, ids);
	load(swap_disks, front.mem);
	CHECK(served > 100, "only %lu requests under load", served);
}

/* The front-end's own view of the memory; the module sees the others. */
static int memory_fd;

static void *move_memory(void *arg)
{
	struct front *f = arg;
	uint8_t *old = NULL;

	for (int i = 0; i < 30; i++) {
		uint8_t *mem = mmap(NULL, MEM_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
				    memory_fd, 0);

		CHECK(mem != MAP_FAILED, "mmap: %m");
		CHECK(!front_table(f, mem), "SET_MEM_TABLE: %m");
		/* No request may still use the old memory. */
		if (old)
			munmap(old, MEM_BYTES);
		old = mem;
		usleep(2000);
	}
	changing = false;
	return NULL;
}

static void memory_table(void)
{
	uint8_t *mem;

	prepare(FAST);
	memory_fd = memfd_create("memory", MFD_CLOEXEC);
	CHECK(!ftruncate(memory_fd, MEM_BYTES), "ftruncate: %m");
	mem = mmap(NULL, MEM_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0);
	front_open(&front, mem, QUEUES, USUAL_FEATURES);
	CHECK(!front_backend(&front, FAST) && !ioctl(front.fd, VHOST_BLK_START), "START: %m");
	front_workers(&front, 2, ids);
	load(move_memory, mem);
	CHECK(served > 100, "only %lu requests under load", served);
}

/* STOP returns when the last request of the slow disk has ended. */
static void stop_drains(void)
{
	struct vhost_vring_state state = { 0, 0 };
	struct front f;
	uint16_t used;

	front_new(&f, 1, USUAL_FEATURES, SLOW);
	for (int i = 0; i < 20; i++)
		CHECK(start(&f, 0, VIRTIO_BLK_T_IN, i * 8, DATA_AT + i * 4096, 4096) >= 0, "room");
	kick(&f, 0);
	usleep(100000);
	CHECK(f.rings[0].v.used->idx == 0, "the slow disk is fast");
	CHECK(!ioctl(f.fd, VHOST_BLK_STOP), "STOP: %m");
	used = f.rings[0].v.used->idx;
	CHECK(used == 20, "%u of 20 requests after STOP", used);
	CHECK(start(&f, 0, VIRTIO_BLK_T_IN, 0, DATA_AT, 4096) >= 0, "room");
	kick_always(&f, 0);
	usleep(500000);
	CHECK(f.rings[0].v.used->idx == used, "a stopped queue serves");
	CHECK(!ioctl(f.fd, VHOST_GET_VRING_BASE, &state) && state.num == used, "base %u", state.num);
	CHECK(!ioctl(f.fd, VHOST_BLK_START), "START: %m");
	for (int i = 0; i < 21; i++) {
		int head = reap_wait(&f, 0, NULL);

		CHECK(*status_of(&f, 0, head) == OK, "status of request %d", i);
	}
}

/* More than a queue may have in flight: the rest waits in the ring. */
static void queue_limit(void)
{
	struct part pieces[256];
	struct front f;
	int last = -1;

	/* Each request pins 256 pages, although it has few bytes. */
	for (int i = 0; i < 256; i++)
		pieces[i] = (struct part){ at(DATA_AT + i * 4096), 512, VRING_DESC_F_WRITE };
	front_new(&f, 1, USUAL_FEATURES | EVENT_IDX, SLOW);
	/* All requests have the same indirect table: that of the last one. */
	for (int i = 0; i < 100; i++) {
		last = start_parts(&f, 0, VIRTIO_BLK_T_IN, 0, pieces, 256, true);
		CHECK(last >= 0, "room");
	}
	kick(&f, 0);
	for (int i = 0; i < 100; i++)
		reap_wait(&f, 0, NULL);
	CHECK(*status_of(&f, 0, last) == OK, "status %u", *status_of(&f, 0, last));
}

static void large_blocks(void)
{
	struct front f;

	front_new(&f, 1, USUAL_FEATURES, BLOCK4K);
	fill(f.mem + DATA_AT + 3, 8, 65536, 9);
	CHECK(request(&f, 0, VIRTIO_BLK_T_OUT, 8, DATA_AT + 3, 65536) == OK, "a write");
	memset(f.mem + DATA_AT, 0, 65536);
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, 8, DATA_AT, 65536) == OK, "a read");
	CHECK(holds(f.mem + DATA_AT, 8, 65536, 9), "other data");
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, 1, DATA_AT, 4096) == IOERR, "sector 1");
	CHECK(request(&f, 0, VIRTIO_BLK_T_OUT, 0, DATA_AT, 512) == IOERR, "512 bytes");
}

/* One bad sector in the middle of 4 MiB; nb-fast has it at 50000. */
static void disk_errors(void)
{
	struct front f;
	uint32_t len;
	int head;

	front_new(&f, 1, USUAL_FEATURES, FAST);
	for (int type = VIRTIO_BLK_T_IN; type <= VIRTIO_BLK_T_OUT; type++) {
		for (int odd = 0; odd < 2; odd++) {
			head = start(&f, 0, type, 45000, DATA_AT + odd, 4 << 20);
			CHECK(finish(&f, 0, head, &len) == IOERR, "type %d: status", type);
		}
	}
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, 49000, DATA_AT, 4096) == OK, "before it");
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, 50008, DATA_AT, 4096) == OK, "after it");
}

static unsigned long flushes(void)
{
	unsigned long n[17] = { 0 };
	FILE *file = fopen("/sys/block/loop0/stat", "r");

	CHECK(file, "no statistics");
	for (int i = 0; i < 17; i++)
		if (fscanf(file, "%lu", &n[i]) != 1)
			break;
	fclose(file);
	return n[15];
}

static unsigned long flushes_of_writes(uint64_t features, uint32_t flags)
{
	struct virtio_blk_discard_write_zeroes *r;
	unsigned long before;
	struct front f;

	front_open(&f, front_memory(), 1, features);
	CHECK(!front_backend(&f, LOOP), "SET_BACKEND: %m");
	CHECK(!ioctl(f.fd, VHOST_BLK_SET_FLAGS, &flags), "SET_FLAGS: %m");
	CHECK(!ioctl(f.fd, VHOST_BLK_START), "START: %m");
	before = flushes();
	for (int i = 0; i < 5; i++)
		CHECK(request(&f, 0, VIRTIO_BLK_T_OUT, 0, DATA_AT, 4096) == OK, "a write");
	r = (void *)(f.mem + DATA_AT);
	*r = (struct virtio_blk_discard_write_zeroes){ .sector = 8, .num_sectors = 8 };
	CHECK(request(&f, 0, VIRTIO_BLK_T_WRITE_ZEROES, 0, DATA_AT, 16) == OK, "zeroes");
	close(f.fd);
	return flushes() - before;
}

/* The loop device has a write cache and no FUA, so Linux flushes it instead. */
static void write_cache(void)
{
	unsigned long n = flushes_of_writes(USUAL_FEATURES, 0);
	uint64_t no_flush = USUAL_FEATURES & ~(1ULL << VIRTIO_BLK_F_FLUSH);

	CHECK(n == 0, "%lu flushes although the driver flushes itself", n);
	n = flushes_of_writes(no_flush, 0);
	CHECK(n >= 6, "%lu flushes for 6 writes of a driver without FLUSH", n);
	n = flushes_of_writes(USUAL_FEATURES, VHOST_BLK_WRITE_THROUGH);
	CHECK(n >= 6, "%lu flushes for 6 writes through", n);
}

static void resize(void)
{
	uint64_t before, after;
	struct front f;
	int loop;

	front_new(&f, 1, USUAL_FEATURES, LOOP);
	CHECK(!ioctl(f.fd, VHOST_BLK_RESIZE, &before), "RESIZE: %m");
	CHECK(!truncate("/tmp/loop", (before + 2048) * SECTOR), "truncate: %m");
	loop = open_disk(LOOP, O_RDONLY);
	CHECK(!ioctl(loop, LOOP_SET_CAPACITY), "LOOP_SET_CAPACITY: %m");
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, before, DATA_AT, 4096) == IOERR, "too early");
	CHECK(!ioctl(f.fd, VHOST_BLK_RESIZE, &after), "RESIZE: %m");
	CHECK(after == before + 2048, "%llu sectors", (unsigned long long)after);
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, before, DATA_AT, 4096) == OK, "the new sectors");
	CHECK(!truncate("/tmp/loop", before * SECTOR), "truncate: %m");
	CHECK(!ioctl(loop, LOOP_SET_CAPACITY), "LOOP_SET_CAPACITY: %m");
	CHECK(!ioctl(f.fd, VHOST_BLK_RESIZE, &after) && after == before, "RESIZE: %m");
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, before, DATA_AT, 4096) == IOERR, "the old size");
}

/* A new call eventfd gets a signal, and so does START. */
static void lost_interrupt(void)
{
	struct vhost_vring_file file = { 0 };
	struct front f;

	front_new(&f, 1, USUAL_FEATURES, FAST);
	CHECK(event_within(f.rings[0].call, 5000), "no signal after START");
	front_fds(&f, 1);
	file.fd = f.rings[0].call;
	CHECK(!ioctl(f.fd, VHOST_SET_VRING_CALL, &file), "CALL: %m");
	CHECK(event_within(f.rings[0].call, 5000), "no signal for a new eventfd");
}

const struct test life_tests[] = {
	{ "life-workers-move", workers },
	{ "life-backend-swapped", backends },
	{ "life-memory-moves", memory_table },
	{ "life-stop-drains", stop_drains },
	{ "life-queue-limit", queue_limit },
	{ "life-blocks-of-4k", large_blocks },
	{ "life-disk-errors", disk_errors },
	{ "life-write-cache", write_cache },
	{ "life-resize", resize },
	{ "life-lost-interrupt", lost_interrupt },
	{ NULL, NULL },
};
