// SPDX-License-Identifier: GPL-2.0-only
/*
 * Faulty rings and ioctls.  A faulty ring stops its queue and signals the
 * error eventfd, a faulty request gets a status, a faulty ioctl an errno.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "front.h"

#define DISK	"/dev/nb-fast"
#define W	VRING_DESC_F_WRITE
#define NEXT	VRING_DESC_F_NEXT
#define INDIRECT VRING_DESC_F_INDIRECT
#define HDR	(SLOTS_AT + 100 * SLOT_BYTES)
#define STATUS	(HDR + 32)
#define IOERR	VIRTIO_BLK_S_IOERR

/* The other queue still works, and the faulty one has no used entry. */
static void expect_stopped(struct front *f, const char *what)
{
	kick_always(f, 0);
	CHECK(event_within(f->rings[0].err, 5000), "%s: no error event", what);
	CHECK(f->rings[0].v.used->idx == 0, "%s: a used entry", what);
	CHECK(request(f, 1, VIRTIO_BLK_T_IN, 0, DATA_AT, 4096) == VIRTIO_BLK_S_OK,
	      "%s: the other queue does not work", what);
	/* Another kick changes nothing. */
	kick_always(f, 0);
	usleep(20000);
	CHECK(f->rings[0].v.used->idx == 0, "%s: a late used entry", what);
	CHECK(!ioctl(f->fd, VHOST_BLK_STOP), "%s: STOP: %m", what);
	/* With a good ring it starts again. */
	front_rings(f, true);
	CHECK(!ioctl(f->fd, VHOST_BLK_START), "%s: START: %m", what);
	CHECK(request(f, 0, VIRTIO_BLK_T_IN, 0, DATA_AT, 4096) == VIRTIO_BLK_S_OK,
	      "%s: the queue does not start again", what);
	CHECK(!ioctl(f->fd, VHOST_BLK_STOP), "%s: STOP: %m", what);
	front_rings(f, true);
	CHECK(!ioctl(f->fd, VHOST_BLK_START), "%s: START: %m", what);
	event_within(f->rings[0].err, 0);
}

static void header(struct front *f, uint32_t type, uint64_t sector)
{
	*(struct virtio_blk_outhdr *)(f->mem + HDR) =
		(struct virtio_blk_outhdr){ .type = type, .sector = sector };
	f->mem[STATUS] = 0xee;
}

static void publish(struct front *f, uint16_t head, uint16_t idx)
{
	f->rings[0].v.avail->ring[0] = head;
	__atomic_store_n(&f->rings[0].v.avail->idx, idx, __ATOMIC_RELEASE);
}

struct desc_case {
	const char *what;
	struct vring_desc table[4];
};

static void rings(void)
{
	static const struct desc_case cases[] = {
		{ "a loop", { { GUEST_BASE + HDR, 16, NEXT, 1 },
			      { GUEST_BASE + DATA_AT, 512, NEXT, 0 } } },
		{ "a descriptor outside the table", { { GUEST_BASE + HDR, 16, NEXT, 60000 } } },
		{ "an address outside memory", { { GUEST_BASE + HDR, 16, NEXT, 1 },
			{ GUEST_BASE + MEM_BYTES, 512, NEXT | W, 2 },
			{ GUEST_BASE + STATUS, 1, W, 0 } } },
		{ "an address below memory", { { 0x1000, 16, NEXT, 1 },
			{ GUEST_BASE + STATUS, 1, W, 0 } } },
		{ "the end of memory", { { GUEST_BASE + HDR, 16, NEXT, 1 },
			{ GUEST_BASE + MEM_BYTES - 512, 513, W, 0 } } },
		{ "an address that wraps", { { GUEST_BASE + HDR, 16, NEXT, 1 },
			{ ~0ULL - 100, 0xffffffff, W, 0 } } },
		{ "writable before readable", { { GUEST_BASE + STATUS, 1, NEXT | W, 1 },
			{ GUEST_BASE + HDR, 16, 0, 0 } } },
		{ "no status", { { GUEST_BASE + HDR, 16, NEXT, 1 },
			{ GUEST_BASE + DATA_AT, 512, 0, 0 } } },
		{ "a status of no bytes", { { GUEST_BASE + HDR, 16, NEXT, 1 },
			{ GUEST_BASE + STATUS, 0, W, 0 } } },
		{ "nothing at all", { { GUEST_BASE + HDR, 0, 0, 0 } } },
		{ "an indirect table of 17 bytes", { { GUEST_BASE + TABLES_AT, 17, INDIRECT, 0 } } },
		{ "an empty indirect table", { { GUEST_BASE + TABLES_AT, 0, INDIRECT, 0 } } },
		{ "an indirect table outside memory", { { 16, 16, INDIRECT, 0 } } },
		{ "a nested indirect table", { { GUEST_BASE + TABLES_AT, 32, INDIRECT, 0 } } },
		{ "a huge indirect table", { { GUEST_BASE + TABLES_AT, 2 << 20, INDIRECT, 0 } } },
	};
	struct front f;

	front_new(&f, 2, USUAL_FEATURES, DISK);
	for (unsigned int i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		struct vring_desc nested = { GUEST_BASE + TABLES_AT, 16, INDIRECT, 0 };

		header(&f, VIRTIO_BLK_T_IN, 0);
		memcpy(f.mem + TABLES_AT, &nested, sizeof(nested));
		memcpy(f.rings[0].v.desc, cases[i].table, sizeof(cases[i].table));
		publish(&f, 0, 1);
		expect_stopped(&f, cases[i].what);
	}
	publish(&f, RING_NUM, 1);
	expect_stopped(&f, "a head outside the ring");
	publish(&f, 0xffff, 1);
	expect_stopped(&f, "head 65535");
	publish(&f, 0, RING_NUM + 1);
	expect_stopped(&f, "an available index that jumps");
	publish(&f, 0, 0xffff);
	expect_stopped(&f, "an available index that goes back");
}

/* A stopped queue ignores good requests, too. */
static void stays_stopped(void)
{
	struct part no_status = { at(HDR), 16, 0 };
	struct front f;

	front_new(&f, 2, USUAL_FEATURES, DISK);
	header(&f, VIRTIO_BLK_T_FLUSH, 0);
	CHECK(put_chain(&f, 0, &no_status, 1, false) >= 0, "no room");
	kick_always(&f, 0);
	CHECK(event_within(f.rings[0].err, 5000), "no error event");
	CHECK(start(&f, 0, VIRTIO_BLK_T_IN, 0, DATA_AT, 4096) >= 0, "no room");
	kick_always(&f, 0);
	CHECK(request(&f, 1, VIRTIO_BLK_T_IN, 0, DATA_AT, 4096) == VIRTIO_BLK_S_OK,
	      "the other queue does not work");
	usleep(100000);
	CHECK(f.rings[0].v.used->idx == 0, "a stopped queue serves");
}

static void many(struct front *f, unsigned int n, uint32_t len, struct part *parts)
{
	for (unsigned int i = 0; i < n; i++)
		parts[i] = (struct part){ at(DATA_AT), len, W };
	CHECK(start_parts(f, 0, VIRTIO_BLK_T_IN, 0, parts, n, true) >= 0, "no room");
}

static void requests(void)
{
	static struct part parts[1100];
	struct front f;
	int head;

	front_new(&f, 2, USUAL_FEATURES, DISK);
	/* More pieces than vhost accepts. */
	many(&f, 1050, 512, parts);
	expect_stopped(&f, "1052 indirect descriptors");
	/* 8 GiB into the same 8 MiB. */
	many(&f, 1000, 8 << 20, parts);
	kick(&f, 0);
	head = reap_wait(&f, 0, NULL);
	CHECK(*status_of(&f, 0, head) == IOERR, "8 GiB: status");
	header(&f, VIRTIO_BLK_T_IN, 0);
	struct part no_header[] = { { at(STATUS), 1, W } };
	head = put_chain(&f, 0, no_header, 1, false);
	kick(&f, 0);
	CHECK(reap_wait(&f, 0, NULL) == head && f.mem[STATUS] == IOERR, "no header");
	f.mem[STATUS] = 0xee;
	struct part half[] = { { at(HDR), 8, 0 }, { at(STATUS), 1, W } };
	head = put_chain(&f, 0, half, 2, false);
	kick(&f, 0);
	CHECK(reap_wait(&f, 0, NULL) == head && f.mem[STATUS] == IOERR, "half a header");
}

/* The memory table names memory that is not there, or not writable. */
static void memory(void)
{
	struct front f;
	int head;

	front_new(&f, 2, USUAL_FEATURES, DISK);
	CHECK(!munmap(f.mem + DATA_AT, 4096), "munmap");
	for (int type = VIRTIO_BLK_T_IN; type <= VIRTIO_BLK_T_OUT; type++)
		for (int odd = 0; odd < 2; odd++)
			CHECK(request(&f, 0, type, 0, DATA_AT + odd, 4096) == IOERR,
			      "type %d without memory", type);
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, 0, DATA_AT - 4096, 8192) == IOERR,
	      "half of the memory is missing");
	CHECK(request(&f, 0, VIRTIO_BLK_T_GET_ID, 0, DATA_AT, 20) == IOERR, "GET_ID");
	CHECK(request(&f, 0, VIRTIO_BLK_T_DISCARD, 0, DATA_AT, 16) == IOERR, "DISCARD");
	CHECK(!mprotect(f.mem + DATA_AT + 8192, 4096, PROT_READ), "mprotect");
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, 0, DATA_AT + 8192, 4096) == IOERR,
	      "a read into memory that is not writable");
	CHECK(request(&f, 0, VIRTIO_BLK_T_OUT, 0, DATA_AT + 8192, 4096) == VIRTIO_BLK_S_OK,
	      "a write from memory that is not writable");
	/* The status has no place: an error event, and the chain comes back. */
	struct part lost[] = { { at(HDR), 16, 0 }, { at(DATA_AT), 1, W } };
	header(&f, VIRTIO_BLK_T_FLUSH, 0);
	head = put_chain(&f, 0, lost, 2, false);
	kick(&f, 0);
	CHECK(reap_wait(&f, 0, NULL) == head, "lost status: no used entry");
	CHECK(event_within(f.rings[0].err, 5000), "lost status: no error event");
	/* The used ring has no place any more: the queue stops. */
	CHECK(!mprotect(f.mem, RING_BYTES, PROT_READ), "mprotect");
	CHECK(!mprotect(f.mem, 8192, PROT_READ | PROT_WRITE), "mprotect");
	CHECK((uint8_t *)f.rings[0].v.used >= f.mem + 8192, "the used ring is elsewhere");
	CHECK(start(&f, 0, VIRTIO_BLK_T_IN, 0, DATA_AT + 16384, 512) >= 0, "no room");
	kick_always(&f, 0);
	CHECK(event_within(f.rings[0].err, 5000), "no used ring: no error event");
	CHECK(!ioctl(f.fd, VHOST_BLK_STOP), "no used ring: STOP: %m");
	CHECK(ioctl(f.fd, VHOST_BLK_START) && errno == EFAULT, "START without a used ring");
}

#define REFUSED(error, call, ...) \
	CHECK((call) == -1 && errno == (error), __VA_ARGS__)

static void ioctls(void)
{
	struct vhost_vring_state state = { .index = VHOST_BLK_MAX_QUEUES, .num = 16 };
	uint64_t features, log_all = 1ULL << VHOST_F_LOG_ALL, usual = USUAL_FEATURES;
	uint32_t flags = 1U << 31, zero = 0, read_only = VHOST_BLK_READ_ONLY;
	int fd, none = -1, other = open("/dev/vhost-blk", O_RDWR);
	struct front f;
	struct stat st;

	CHECK(!stat("/dev/vhost-blk", &st) && (st.st_mode & 07777) == 0600, "mode %o", st.st_mode);
	CHECK(!ioctl(other, VHOST_GET_FEATURES, &features), "GET_FEATURES: %m");
	CHECK(!(features & log_all), "VHOST_F_LOG_ALL is offered");
	fd = open_disk(DISK, O_RDWR);
	REFUSED(EPERM, ioctl(other, VHOST_BLK_SET_BACKEND, &fd), "SET_BACKEND without owner");
	REFUSED(EPERM, ioctl(other, VHOST_SET_FEATURES, &usual), "SET_FEATURES without owner");
	REFUSED(EPERM, ioctl(other, VHOST_BLK_START), "START without owner");
	REFUSED(EPERM, ioctl(other, VHOST_SET_VRING_NUM, &state), "VRING_NUM without owner");

	memset(&f, 0, sizeof(f));
	f.mem = front_memory();
	f.fd = open("/dev/vhost-blk", O_RDWR);
	CHECK(!ioctl(f.fd, VHOST_SET_OWNER), "SET_OWNER: %m");
	REFUSED(EBUSY, ioctl(f.fd, VHOST_SET_OWNER), "a second SET_OWNER");
	REFUSED(ENODEV, ioctl(f.fd, VHOST_BLK_START), "START without back-end");
	REFUSED(EBADF, ioctl(f.fd, VHOST_BLK_SET_BACKEND, (int[]){ 9999 }), "a bad descriptor");
	REFUSED(ENOTBLK, ioctl(f.fd, VHOST_BLK_SET_BACKEND, &other), "a character device");
	REFUSED(EFAULT, ioctl(f.fd, VHOST_BLK_SET_BACKEND, 8), "a bad pointer");
	REFUSED(EFAULT, ioctl(f.fd, VHOST_BLK_SET_SERIAL, 8), "a bad pointer for the serial");
	REFUSED(ENOTTY, ioctl(f.fd, _IO(VHOST_VIRTIO, 0xEF), &zero), "an unknown ioctl");
	REFUSED(EOPNOTSUPP, ioctl(f.fd, VHOST_SET_LOG_BASE, &features), "SET_LOG_BASE");
	REFUSED(EOPNOTSUPP, ioctl(f.fd, VHOST_SET_FEATURES, &log_all), "VHOST_F_LOG_ALL");
	REFUSED(EOPNOTSUPP, ioctl(f.fd, VHOST_BLK_SET_FLAGS, &flags), "an unknown flag");
	REFUSED(ENOBUFS, ioctl(f.fd, VHOST_SET_VRING_NUM, &state), "queue 32");
	CHECK(!ioctl(f.fd, VHOST_BLK_SET_BACKEND, &fd), "SET_BACKEND: %m");
	REFUSED(EINVAL, ioctl(f.fd, VHOST_BLK_START), "START without rings");
	CHECK(!ioctl(other, VHOST_SET_OWNER), "SET_OWNER: %m");
	REFUSED(EBUSY, ioctl(other, VHOST_BLK_SET_BACKEND, &fd), "a disk that is claimed");
	CHECK(!ioctl(f.fd, VHOST_BLK_SET_BACKEND, &none), "no back-end: %m");
	CHECK(!ioctl(other, VHOST_BLK_SET_BACKEND, &fd), "a disk given back: %m");
	CHECK(!ioctl(other, VHOST_BLK_SET_BACKEND, &none), "no back-end: %m");
	close(fd);
	fd = open_disk(DISK, O_RDONLY);
	REFUSED(EACCES, ioctl(f.fd, VHOST_BLK_SET_BACKEND, &fd), "a descriptor for reading");
	CHECK(!ioctl(f.fd, VHOST_BLK_SET_FLAGS, &read_only), "read-only: %m");
	CHECK(!ioctl(f.fd, VHOST_BLK_SET_BACKEND, &fd), "a read-only disk: %m");
	flags = 0;
	REFUSED(EBUSY, ioctl(f.fd, VHOST_BLK_SET_FLAGS, &flags), "writable again");
	CHECK(!ioctl(f.fd, VHOST_BLK_SET_BACKEND, &none), "no back-end: %m");
	close(fd);
	fd = open_disk(DISK, O_WRONLY);
	REFUSED(EACCES, ioctl(f.fd, VHOST_BLK_SET_BACKEND, &fd), "a descriptor for writing");
	close(fd);

	/* Rings but no memory table. */
	CHECK(!ioctl(f.fd, VHOST_BLK_SET_FLAGS, &flags), "writable: %m");
	front_fds(&f, 1);
	CHECK(!front_backend(&f, DISK), "SET_BACKEND: %m");
	struct vhost_vring_addr addr = { 0 };

	addr.desc_user_addr = addr.avail_user_addr = addr.used_user_addr = (uintptr_t)f.mem;
	CHECK(!ioctl(f.fd, VHOST_SET_VRING_ADDR, &addr), "VRING_ADDR: %m");
	REFUSED(EFAULT, ioctl(f.fd, VHOST_BLK_START), "START without memory");
	front_setup(&f, 1, USUAL_FEATURES, true);
	CHECK(!ioctl(f.fd, VHOST_BLK_START), "START: %m");
	REFUSED(EBUSY, ioctl(f.fd, VHOST_BLK_START), "a second START");
	REFUSED(EBUSY, ioctl(f.fd, VHOST_SET_FEATURES, &usual), "SET_FEATURES of a running disk");
	state = (struct vhost_vring_state){ 0, 16 };
	REFUSED(EBUSY, ioctl(f.fd, VHOST_SET_VRING_NUM, &state), "VRING_NUM of a running queue");
	REFUSED(EBUSY, ioctl(f.fd, VHOST_SET_VRING_BASE, &state), "VRING_BASE of a running queue");
	if (!fork()) {
		/* Another process has the descriptor, but is not the owner. */
		_exit(ioctl(f.fd, VHOST_BLK_STOP) == -1 && errno == EPERM ? 0 : 1);
	}
	int status;

	wait(&status);
	CHECK(!status, "another process may use the disk");
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, 0, DATA_AT, 4096) == VIRTIO_BLK_S_OK, "a read");
}

static uint64_t random_state = 88172645463325252ULL;

static uint64_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	return *state ^= *state << 17;
}

/* Mostly plausible descriptors and headers. */
static void scribble(struct front *f, uint64_t *state, bool all)
{
	static const uint32_t lens[] = { 0, 1, 15, 16, 17, 511, 512, 4096, 65536, 1 << 20, ~0U };
	unsigned int i = next_random(state) % 32;
	struct vring_desc *d = &f->rings[0].v.desc[i];
	uint64_t r = next_random(state);
	struct virtio_blk_outhdr *h = (void *)(f->mem + SLOTS_AT + i * SLOT_BYTES);

	d->addr = r % 8 ? at(SLOTS_AT + r / 8 % (8 << 20)) : r;
	if (r % 3)
		d->addr = at(SLOTS_AT + r % 32 * SLOT_BYTES);
	d->len = r >> 32 & 1 ? lens[(r >> 33) % 11] : 16;
	d->flags = (r >> 40) % 64 ? (r >> 40) & 3 : (r >> 40);
	d->next = (r >> 48) % 33;
	h->type = (r >> 20) % 15;
	h->sector = (r >> 52) % 1100 * 64;
	if (!all)
		return;
	f->rings[0].v.avail->ring[r % RING_NUM] = (r >> 9) % 33;
	if (!(r >> 60))
		f->rings[0].v.avail->idx += (r >> 30) % 300;
}

static volatile bool racing;

static void *race(void *arg)
{
	uint64_t state = 0x1234567;

	while (racing)
		scribble(arg, &state, true);
	return NULL;
}

static void random_rings(bool with_race)
{
	int rounds = getenv("LONG") ? 3000 : 300;
	struct front f;
	pthread_t thread;

	front_new(&f, 2, USUAL_FEATURES, DISK);
	racing = with_race;
	if (with_race)
		CHECK(!pthread_create(&thread, NULL, race, &f), "no thread");
	for (int round = 0; round < rounds; round++) {
		for (int i = 0; i < 40; i++)
			scribble(&f, &random_state, false);
		for (int i = 0; i < 8; i++)
			f.rings[0].v.avail->ring[i] = next_random(&random_state) % 32;
		__atomic_store_n(&f.rings[0].v.avail->idx, 8, __ATOMIC_RELEASE);
		kick_always(&f, 0);
		if (round % 4 == 0)
			usleep(1000);
		CHECK(!ioctl(f.fd, VHOST_BLK_STOP), "round %d: STOP: %m", round);
		front_rings(&f, true);
		CHECK(!ioctl(f.fd, VHOST_BLK_START), "round %d: START: %m", round);
	}
	racing = false;
	if (with_race)
		pthread_join(thread, NULL);
	CHECK(!ioctl(f.fd, VHOST_BLK_STOP), "STOP: %m");
	front_rings(&f, true);
	CHECK(!ioctl(f.fd, VHOST_BLK_START), "START: %m");
	CHECK(request(&f, 0, VIRTIO_BLK_T_IN, 0, DATA_AT, 4096) == VIRTIO_BLK_S_OK,
	      "the queue no longer works");
}

static void still_rings(void)
{
	random_rings(false);
}

static void racing_rings(void)
{
	random_rings(true);
}

const struct test hostile_tests[] = {
	{ "hostile-rings", rings },
	{ "hostile-stays-stopped", stays_stopped },
	{ "hostile-requests", requests },
	{ "hostile-memory", memory },
	{ "hostile-ioctls", ioctls },
	{ "hostile-random-rings", still_rings },
	{ "hostile-racing-rings", racing_rings },
	{ NULL, NULL },
};
