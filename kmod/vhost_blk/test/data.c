// SPDX-License-Identifier: GPL-2.0-only
/* Tests of requests: what is written is on the disk, what is read is right. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "front.h"

#define OK	VIRTIO_BLK_S_OK
#define DISK	disk_under_test
#define IN	VIRTIO_BLK_T_IN
#define OUT	VIRTIO_BLK_T_OUT

/* Depth of each queue, and bytes of each request, in the test of all queues. */
#define DEPTH	8
#define CHUNK	16384UL

static void write_and_read(unsigned int nq, unsigned int workers, uint64_t features)
{
	uint32_t ids[8], generation = nq * 16 + workers;
	struct front f;
	unsigned int q;

	front_new(&f, nq, features, DISK);
	front_workers(&f, workers, ids);
	for (int pass = 0; pass < 2; pass++) {
		for (unsigned int round = 0; round < 3; round++) {
			for (q = 0; q < nq; q++) {
				for (int i = 0; i < DEPTH; i++) {
					size_t n = q * DEPTH + i;
					uint64_t sector = (round * nq * DEPTH + n) * CHUNK / SECTOR;
					uint8_t *data = f.mem + DATA_AT + n * CHUNK;

					memset(data, 0, CHUNK);
					if (!pass)
						fill(data, sector, CHUNK, generation);
					CHECK(start(&f, q, pass ? IN : OUT, sector,
						    data - f.mem, CHUNK) >= 0, "no room");
				}
				kick(&f, q);
			}
			for (q = 0; q < nq; q++) {
				for (int i = 0; i < DEPTH; i++) {
					uint32_t len;
					int head = reap_wait(&f, q, &len);

					CHECK(*status_of(&f, q, head) == OK, "status %u",
					      *status_of(&f, q, head));
					CHECK(len == (pass ? CHUNK + 1 : 1), "used len %u", len);
				}
			}
			for (size_t n = 0; pass && n < nq * DEPTH; n++)
				CHECK(holds(f.mem + DATA_AT + n * CHUNK,
					    (round * nq * DEPTH + n) * CHUNK / SECTOR,
					    CHUNK, generation), "wrong data in chunk %zu", n);
		}
	}
	/* The disk itself has the data. */
	disk_read(DISK, 0, f.mem + DATA_AT, nq * DEPTH * CHUNK);
	CHECK(holds(f.mem + DATA_AT, 0, nq * DEPTH * CHUNK, generation),
	      "the disk has other data");
	close(f.fd);
	for (q = 0; q < nq; q++) {
		close(f.rings[q].kick);
		close(f.rings[q].call);
		close(f.rings[q].err);
	}
}

static void queues_and_workers(void)
{
	static const unsigned int queues[] = { 1, 2, 4, 8 };

	for (int i = 0; i < 4; i++)
		for (unsigned int workers = 1; workers <= 4; workers++)
			write_and_read(queues[i], workers,
				       USUAL_FEATURES | (workers & 1 ? EVENT_IDX : 0));
}

static void most_queues(void)
{
	write_and_read(32, 8, USUAL_FEATURES | EVENT_IDX);
}

/* Each byte range of the disk has the right origin. */
static void expect(struct front *f, uint64_t sector, size_t bytes, uint32_t generation,
		   const char *what)
{
	CHECK(request(f, 0, IN, sector, DATA_AT, bytes) == OK, "cannot read back");
	if (generation)
		CHECK(holds(f->mem + DATA_AT, sector, bytes, generation), "%s", what);
	for (size_t i = 0; !generation && i < bytes; i++)
		CHECK(!f->mem[DATA_AT + i], "%s: byte %zu", what, i);
}

static void write_pattern(struct front *f, uint64_t sector, size_t bytes,
			  uint32_t generation)
{
	fill(f->mem + DATA_AT, sector, bytes, generation);
	CHECK(request(f, 0, OUT, sector, DATA_AT, bytes) == OK, "cannot write");
}

static int ranges(struct front *f, uint32_t type, unsigned int n,
		  const struct virtio_blk_discard_write_zeroes *r)
{
	memcpy(f->mem + DATA_AT, r, n * sizeof(*r));
	return request(f, 0, type, 0, DATA_AT, n * sizeof(*r));
}

static long queue_limit(const char *name)
{
	char path[128];
	long value = -1;
	FILE *file;

	snprintf(path, sizeof(path), "/sys/block/%s/queue/%s", strrchr(DISK, '/') + 1, name);
	file = fopen(path, "r");
	CHECK(file && fscanf(file, "%ld", &value) == 1, "cannot read %s", path);
	fclose(file);
	return value;
}

static void kinds(void)
{
	struct virtio_blk_discard_write_zeroes three[3] = {
		{ .sector = 8, .num_sectors = 8 },
		{ .sector = 32, .num_sectors = 0 },
		{ .sector = 4096, .num_sectors = 6000 },
	};
	struct virtio_blk_discard_write_zeroes one = three[0];
	char serial[VHOST_BLK_SERIAL_BYTES + 1] = "a serial of 20 bytes";
	struct front f;
	uint32_t len;
	int head;

	front_open(&f, front_memory(), 1, USUAL_FEATURES);
	CHECK(!ioctl(f.fd, VHOST_BLK_SET_SERIAL, serial), "SET_SERIAL: %m");
	CHECK(!front_backend(&f, DISK) && !ioctl(f.fd, VHOST_BLK_START), "START: %m");

	head = start(&f, 0, VIRTIO_BLK_T_GET_ID, 0, DATA_AT, 20);
	CHECK(finish(&f, 0, head, &len) == OK && len == 21, "GET_ID: len %u", len);
	CHECK(!memcmp(f.mem + DATA_AT, serial, 20), "another serial");
	head = start(&f, 0, VIRTIO_BLK_T_GET_ID, 0, DATA_AT, 7);
	CHECK(finish(&f, 0, head, &len) == OK && len == 8, "short GET_ID: len %u", len);

	head = start(&f, 0, VIRTIO_BLK_T_FLUSH, 0, 0, 0);
	CHECK(finish(&f, 0, head, &len) == OK && len == 1, "FLUSH");
	CHECK(request(&f, 0, 77, 0, DATA_AT, 512) == VIRTIO_BLK_S_UNSUPP, "type 77");
	CHECK(request(&f, 0, OUT, 0, 0, 0) == OK, "write of nothing");

	/* Zeroes in several ranges, and nothing beside them. */
	write_pattern(&f, 0, 64 * SECTOR, 3);
	write_pattern(&f, 4090, 6012 * SECTOR, 3);
	CHECK(ranges(&f, VIRTIO_BLK_T_WRITE_ZEROES, 3, three) == OK, "WRITE_ZEROES");
	expect(&f, 0, 8 * SECTOR, 3, "zeroes before the range");
	expect(&f, 8, 8 * SECTOR, 0, "no zeroes");
	expect(&f, 16, 48 * SECTOR, 3, "zeroes after the range");
	expect(&f, 4090, 6 * SECTOR, 3, "zeroes before the third range");
	expect(&f, 4096, 6000 * SECTOR, 0, "no zeroes in the third range");
	expect(&f, 10096, 6 * SECTOR, 3, "zeroes after the third range");
	one.sector = 16;
	one.flags = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
	CHECK(ranges(&f, VIRTIO_BLK_T_WRITE_ZEROES, 1, &one) == OK, "with UNMAP");
	expect(&f, 16, 8 * SECTOR, 0, "no zeroes with UNMAP");
	one.flags = 2;
	CHECK(ranges(&f, VIRTIO_BLK_T_WRITE_ZEROES, 1, &one) == VIRTIO_BLK_S_UNSUPP,
	      "WRITE_ZEROES with an unknown flag");

	/* Discarded blocks may have any content; others keep theirs. */
	if (queue_limit("discard_max_bytes")) {
		CHECK(ranges(&f, VIRTIO_BLK_T_DISCARD, 3, three) == OK, "DISCARD");
		expect(&f, 0, 8 * SECTOR, 3, "discard before the range");
		expect(&f, 24, 40 * SECTOR, 3, "discard after the range");
		one.flags = 1;
		CHECK(ranges(&f, VIRTIO_BLK_T_DISCARD, 1, &one) == VIRTIO_BLK_S_UNSUPP,
		      "DISCARD with a flag");
	} else {
		CHECK(ranges(&f, VIRTIO_BLK_T_DISCARD, 1, three) == VIRTIO_BLK_S_UNSUPP,
		      "DISCARD on a disk that has none");
	}
}

/* Writes one pattern with each way to cut a request, and reads it likewise. */
static void cut(const char *what, const struct part *data, unsigned int n, size_t bytes,
		const uint8_t *place, struct front *f, bool indirect, uint32_t generation)
{
	struct part in[1100];
	static uint8_t copy[8 << 20];
	uint32_t len;
	int head;

	fill(f->mem + DATA_AT, 64, bytes, generation);
	memcpy(copy, f->mem + DATA_AT, bytes);
	memmove((void *)place, copy, bytes);
	head = start_parts(f, 0, OUT, 64, data, n, indirect);
	CHECK(finish(f, 0, head, &len) == OK && len == 1, "%s: write", what);
	disk_read(DISK, 64, copy, bytes);
	CHECK(holds(copy, 64, bytes, generation), "%s: other data on the disk", what);
	memset((void *)place, 0x55, bytes);
	memcpy(in, data, n * sizeof(*in));
	for (unsigned int i = 0; i < n; i++)
		in[i].flags = VRING_DESC_F_WRITE;
	head = start_parts(f, 0, IN, 64, in, n, indirect);
	CHECK(finish(f, 0, head, &len) == OK, "%s: read", what);
	CHECK(len == bytes + 1, "%s: used len %u", what, len);
	CHECK(holds(place, 64, bytes, generation), "%s: other data read", what);
}

static void cuts(void)
{
	static struct part parts[1100];
	size_t base = DATA_AT, crossing = MEM_BYTES / 2 - 8192;
	struct front f;

	front_new(&f, 1, USUAL_FEATURES, DISK);
	parts[0] = (struct part){ at(base), 8 << 20, 0 };
	cut("8 MiB in one buffer", parts, 1, 8 << 20, f.mem + base, &f, false, 11);
	parts[0] = (struct part){ at(base + 512), 2 << 20, 0 };
	cut("at a sector", parts, 1, 2 << 20, f.mem + base + 512, &f, false, 12);
	parts[0] = (struct part){ at(crossing), 16384, 0 };
	cut("across two regions", parts, 1, 16384, f.mem + crossing, &f, false, 13);
	parts[0] = (struct part){ at(base + 1), 4096, 0 };
	cut("at an odd address", parts, 1, 4096, f.mem + base + 1, &f, false, 14);
	parts[0] = (struct part){ at(base + 3), 3 << 20, 0 };
	cut("3 MiB at an odd address", parts, 1, 3 << 20, f.mem + base + 3, &f, false, 15);
	for (int i = 0; i < 200; i++)
		parts[i] = (struct part){ at(base + i * 4096), 4096, 0 };
	cut("200 descriptors", parts, 200, 200 * 4096, f.mem + base, &f, false, 16);
	for (int i = 0; i < 1000; i++)
		parts[i] = (struct part){ at(base + i * 4096), 4096, 0 };
	cut("1000 indirect descriptors", parts, 1000, 1000 * 4096, f.mem + base, &f, true, 17);
	for (int i = 0; i < 64; i++)
		parts[i] = (struct part){ at(base + i * 64), 64, 0 };
	cut("pieces of a sector", parts, 64, 4096, f.mem + base, &f, true, 18);
	parts[0] = (struct part){ at(base), 1, 0 };
	parts[1] = (struct part){ at(base + 1), 0, 0 };
	parts[2] = (struct part){ at(base + 1), 4095, 0 };
	cut("with an empty descriptor", parts, 3, 4096, f.mem + base, &f, true, 19);
}

/* A header in three pieces; header, data and status in one descriptor each. */
static void layouts(void)
{
	size_t h = SLOTS_AT + 200 * SLOT_BYTES;
	struct virtio_blk_outhdr *header;
	struct front f;
	uint32_t len;
	int head;

	front_new(&f, 1, USUAL_FEATURES, DISK);
	header = (void *)(f.mem + h);
	fill(f.mem + h + 16, 80, 4096, 21);
	*header = (struct virtio_blk_outhdr){ .type = OUT, .sector = 80 };
	f.mem[DATA_AT] = 0xee;
	struct part pieces[] = {
		{ at(h), 3, 0 }, { at(h + 3), 9, 0 }, { at(h + 12), 4 + 100, 0 },
		{ at(h + 116), 3996, 0 }, { at(DATA_AT), 1, VRING_DESC_F_WRITE },
	};
	head = put_chain(&f, 0, pieces, 5, false);
	kick(&f, 0);
	CHECK(reap_wait(&f, 0, &len) == head && !f.mem[DATA_AT] && len == 1,
	      "a header in pieces");
	*header = (struct virtio_blk_outhdr){ .type = IN, .sector = 80 };
	struct part joined[] = {
		{ at(h), 16, 0 }, { at(DATA_AT), 4000, VRING_DESC_F_WRITE },
		{ at(DATA_AT + 4000), 97, VRING_DESC_F_WRITE },
	};
	f.mem[DATA_AT + 4096] = 0xee;
	head = put_chain(&f, 0, joined, 3, false);
	kick(&f, 0);
	CHECK(reap_wait(&f, 0, &len) == head && !f.mem[DATA_AT + 4096] && len == 4097,
	      "data and status in one descriptor");
	CHECK(holds(f.mem + DATA_AT, 80, 4096, 21), "other data read");
}

static void limits(void)
{
	struct virtio_blk_discard_write_zeroes r = { .num_sectors = 8 };
	uint64_t end = 0, sector;
	uint32_t flags = VHOST_BLK_READ_ONLY;
	struct front f;

	front_new(&f, 1, USUAL_FEATURES, DISK);
	CHECK(!ioctl(f.fd, VHOST_BLK_RESIZE, &end) && end, "RESIZE: %m");
	const uint64_t bad[] = { end, end - 7, end + 1, 1ULL << 54, 1ULL << 55, ~0ULL, ~7ULL };

	CHECK(request(&f, 0, IN, end - 8, DATA_AT, 4096) == OK, "the last sectors");
	for (unsigned int i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
		sector = r.sector = bad[i];
		for (int type = IN; type <= OUT; type++)
			CHECK(request(&f, 0, type, sector, DATA_AT, 4096) ==
			      VIRTIO_BLK_S_IOERR, "type %d at sector %llx", type,
			      (unsigned long long)sector);
		CHECK(ranges(&f, VIRTIO_BLK_T_WRITE_ZEROES, 1, &r) == VIRTIO_BLK_S_IOERR,
		      "zeroes at sector %llx", (unsigned long long)sector);
	}
	CHECK(request(&f, 0, IN, 0, DATA_AT, 4097) == VIRTIO_BLK_S_IOERR, "4097 bytes");
	CHECK(request(&f, 0, OUT, 0, DATA_AT, 511) == VIRTIO_BLK_S_IOERR, "511 bytes");
	r.sector = 0;
	CHECK(ranges(&f, VIRTIO_BLK_T_WRITE_ZEROES, 0, &r) == VIRTIO_BLK_S_IOERR, "no range");
	CHECK(request(&f, 0, VIRTIO_BLK_T_WRITE_ZEROES, 0, DATA_AT, 17) ==
	      VIRTIO_BLK_S_IOERR, "17 bytes of ranges");
	CHECK(request(&f, 0, VIRTIO_BLK_T_WRITE_ZEROES, 0, DATA_AT, 257 * 16) ==
	      VIRTIO_BLK_S_IOERR, "257 ranges");

	write_pattern(&f, 0, 4096, 31);
	CHECK(!ioctl(f.fd, VHOST_BLK_SET_FLAGS, &flags), "SET_FLAGS: %m");
	CHECK(request(&f, 0, OUT, 0, DATA_AT + 4096, 4096) == VIRTIO_BLK_S_IOERR,
	      "a write to a read-only disk");
	CHECK(ranges(&f, VIRTIO_BLK_T_WRITE_ZEROES, 1, &r) == VIRTIO_BLK_S_IOERR,
	      "zeroes on a read-only disk");
	expect(&f, 0, 4096, 31, "the read-only disk has changed");
}

const struct test data_tests[] = {
	{ "data-queues-and-workers", queues_and_workers },
	{ "data-32-queues", most_queues },
	{ "data-kinds", kinds },
	{ "data-cuts", cuts },
	{ "data-layouts", layouts },
	{ "data-limits", limits },
	{ NULL, NULL },
};
