// SPDX-License-Identifier: GPL-2.0-only
/*
 * The owner is killed with requests in flight.  They all end, their status and
 * used entries are in memory that this process shares with the owner, and a new
 * owner goes on after them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "front.h"

#define FAST	"/dev/nb-fast"
#define SLOW	"/dev/nb-slow"
#define QUEUES	2
#define REQUESTS 8
#define BYTES	8192UL
#define OK	VIRTIO_BLK_S_OK

static size_t place(unsigned int q, unsigned int i)
{
	/* Every other buffer needs a copy after the end of its bio. */
	return DATA_AT + (q * REQUESTS + i) * 16384 + (i & 1) * 3;
}

static uint64_t sector(unsigned int q, unsigned int i)
{
	return (q * REQUESTS + i) * 64;
}

static uint64_t rescued(int fd)
{
	uint64_t n;

	CHECK(!ioctl(fd, VHOST_BLK_RESCUED, &n), "RESCUED: %m");
	return n;
}

static void become_owner(struct front *f, uint8_t task_mode)
{
	f->fd = open("/dev/vhost-blk", O_RDWR | O_CLOEXEC);
	CHECK(f->fd >= 0, "cannot open /dev/vhost-blk: %m");
	CHECK(!ioctl(f->fd, VHOST_SET_FORK_FROM_OWNER, &task_mode), "worker mode: %m");
	CHECK(!ioctl(f->fd, VHOST_SET_OWNER), "SET_OWNER: %m");
}

static void start_again(struct front *f, uint8_t task_mode, const char *disk)
{
	struct ring saved[QUEUES];

	become_owner(f, task_mode);
	memcpy(saved, f->rings, sizeof(saved));
	front_setup(f, QUEUES, USUAL_FEATURES, false);
	/* front_setup forgets what is in flight; this front-end knows it. */
	memcpy(f->rings, saved, sizeof(saved));
	CHECK(!front_backend(f, disk), "SET_BACKEND after the kill: %m");
	CHECK(!ioctl(f->fd, VHOST_BLK_START), "START: %m");
}

/* The owner: serves rings that its parent has filled, until it is killed. */
static pid_t spawn_owner(struct front *f, uint8_t task_mode, const char *disk)
{
	int pipes[2];
	char c;
	pid_t pid;

	CHECK(!pipe2(pipes, O_CLOEXEC), "pipe: %m");
	pid = fork();
	if (!pid) {
		struct front own = *f;
		uint32_t ids[2];

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		start_again(&own, task_mode, disk);
		if (task_mode)
			front_workers(&own, 2, ids);
		CHECK(write(pipes[1], "r", 1) == 1, "pipe: %m");
		for (;;)
			pause();
	}
	close(pipes[1]);
	CHECK(read(pipes[0], &c, 1) == 1, "the owner did not start");
	close(pipes[0]);
	return pid;
}

static void kill_owner(pid_t pid)
{
	int status;

	CHECK(!kill(pid, SIGKILL), "kill: %m");
	CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status), "the owner was not killed");
}

static void prepare(const char *disk)
{
	static uint8_t page[BYTES] __attribute__((aligned(4096)));
	int fd = open_disk(disk, O_RDWR | O_DIRECT);

	for (unsigned int i = 0; i < QUEUES * REQUESTS; i++) {
		fill(page, i * 64, BYTES, 7);
		CHECK(pwrite(fd, page, BYTES, i * 64 * SECTOR) == BYTES, "pwrite: %m");
	}
	close(fd);
}

static void in_flight(uint8_t task_mode)
{
	int heads[QUEUES][REQUESTS], late, probe = open("/dev/vhost-blk", O_RDWR);
	struct front f = { .mem = front_memory(), .nq = QUEUES };
	uint64_t before, after;
	unsigned int q, i;
	pid_t pid;

	prepare(SLOW);
	front_fds(&f, QUEUES);
	front_rings(&f, true);
	CHECK(!ioctl(probe, VHOST_SET_OWNER), "SET_OWNER: %m");
	before = rescued(probe);
	pid = spawn_owner(&f, task_mode, SLOW);
	for (q = 0; q < QUEUES; q++) {
		event_within(f.rings[q].call, 1000);
		for (i = 0; i < REQUESTS; i++) {
			bool write = i % 4 == 2;

			if (write)
				fill(f.mem + place(q, i), sector(q, i), BYTES, 8);
			heads[q][i] = start(&f, q, write ? VIRTIO_BLK_T_OUT : VIRTIO_BLK_T_IN,
					    sector(q, i), place(q, i), BYTES);
			CHECK(heads[q][i] >= 0, "no room");
		}
		kick_always(&f, q);
	}
	usleep(150000);
	CHECK(!f.rings[0].v.used->idx && !f.rings[1].v.used->idx, "the slow disk is fast");
	kill_owner(pid);
	/* The owner is reaped, so it is drained. */
	for (q = 0; q < QUEUES; q++) {
		CHECK(f.rings[q].v.used->idx == REQUESTS, "queue %u: %u of %u requests ended",
		      q, f.rings[q].v.used->idx, REQUESTS);
		CHECK(event_within(f.rings[q].call, 0), "queue %u: no interrupt", q);
		for (i = 0; i < REQUESTS; i++) {
			bool write = i % 4 == 2;

			CHECK(*status_of(&f, q, heads[q][i]) == OK, "queue %u, request %u: status %u",
			      q, i, *status_of(&f, q, heads[q][i]));
			CHECK(holds(f.mem + place(q, i), sector(q, i), BYTES, write ? 8 : 7),
			      "queue %u, request %u: wrong data", q, i);
		}
	}
	after = rescued(probe);
	if (task_mode)
		CHECK(after > before, "the workqueue had nothing to do");
	else
		CHECK(after == before, "the workqueue ended %llu requests",
		      (unsigned long long)(after - before));

	/* A request that no owner has taken; the new owner's base is stale. */
	while (reap(&f, 0, NULL) >= 0)
		;
	memset(f.mem + place(0, 0), 0, BYTES);
	late = start(&f, 0, VIRTIO_BLK_T_IN, sector(0, 0), place(0, 0), BYTES);
	pid = spawn_owner(&f, task_mode, SLOW);
	CHECK(reap_wait(&f, 0, NULL) == late && *status_of(&f, 0, late) == OK, "the late request");
	CHECK(holds(f.mem + place(0, 0), sector(0, 0), BYTES, 7), "the late request's data");
	usleep(400000);
	CHECK(f.rings[0].v.used->idx == REQUESTS + 1, "requests ran twice: used index %u",
	      f.rings[0].v.used->idx);
	kill_owner(pid);
	disk_read(SLOW, sector(1, 2), f.mem + DATA_AT, BYTES);
	CHECK(holds(f.mem + DATA_AT, sector(1, 2), BYTES, 8), "a write is lost");
}

static void in_flight_tasks(void)
{
	in_flight(1);
}

static void in_flight_kthreads(void)
{
	in_flight(0);
}

/* Kills the owner again and again under full load; every request ends once. */
static void under_load(uint8_t task_mode)
{
	struct front f = { .mem = front_memory(), .nq = QUEUES };
	unsigned long served = 0, kills;
	int request_of[QUEUES][RING_NUM];
	unsigned int q, i;
	pid_t pid;

	prepare(FAST);
	front_fds(&f, QUEUES);
	front_rings(&f, true);
	for (q = 0; q < QUEUES; q++) {
		for (i = 0; i < REQUESTS; i++) {
			int head = start(&f, q, VIRTIO_BLK_T_IN, sector(q, i), place(q, i), BYTES);

			request_of[q][head] = i;
		}
	}
	for (kills = 0; kills < 25; kills++) {
		pid = spawn_owner(&f, task_mode, FAST);
		/* Serve until a moment that differs from owner to owner. */
		for (unsigned long n = 0; n < 40 + kills * 7; n++) {
			uint32_t len;
			int head;

			q = n % QUEUES;
			head = reap_wait(&f, q, &len);
			i = request_of[q][head];
			CHECK(*status_of(&f, q, head) == OK && len == BYTES + 1,
			      "kill %lu: status %u", kills, *status_of(&f, q, head));
			CHECK(holds(f.mem + place(q, i), sector(q, i), BYTES, 7),
			      "kill %lu: wrong data", kills);
			memset(f.mem + place(q, i), 0, BYTES);
			head = start(&f, q, VIRTIO_BLK_T_IN, sector(q, i), place(q, i), BYTES);
			request_of[q][head] = i;
			kick(&f, q);
			served++;
		}
		kill_owner(pid);
	}
	pid = spawn_owner(&f, task_mode, FAST);
	for (q = 0; q < QUEUES; q++) {
		while (f.rings[q].in_flight) {
			int head = reap_wait(&f, q, NULL);

			i = request_of[q][head];
			CHECK(*status_of(&f, q, head) == OK, "at the end: status");
			CHECK(holds(f.mem + place(q, i), sector(q, i), BYTES, 7), "at the end: data");
			served++;
		}
	}
	for (q = 0; q < QUEUES; q++)
		CHECK(f.rings[q].v.used->idx == f.rings[q].v.avail->idx,
		      "queue %u: used index %u, available index %u", q,
		      f.rings[q].v.used->idx, f.rings[q].v.avail->idx);
	kill_owner(pid);
	CHECK(served > 1000, "%lu requests", served);
}

#define LARGE	60U
#define LARGE_BYTES 65536U

static void prepare_large(const char *disk)
{
	static uint8_t all[LARGE * LARGE_BYTES] __attribute__((aligned(4096)));
	int fd = open_disk(disk, O_RDWR | O_DIRECT);

	fill(all, 0, sizeof(all), 9);
	CHECK(pwrite(fd, all, sizeof(all), 0) == sizeof(all), "pwrite: %m");
	close(fd);
}

/*
 * Kills the owner while its worker takes many requests.  The worker has not
 * touched the buffers yet, and Linux pins no new pages for a process that is
 * being killed.  What was taken ends well; the next owner takes the rest.
 */
static void while_taking(void)
{
	struct front f = { .mem = front_memory(), .nq = QUEUES };
	unsigned int cut = 0;

	prepare_large(FAST);
	front_fds(&f, QUEUES);
	front_rings(&f, true);
	for (int round = 0; round < 15; round++) {
		volatile uint16_t *flags = &f.rings[0].v.used->flags;
		volatile uint16_t *used = &f.rings[0].v.used->idx;
		uint16_t before = *used;
		pid_t pid = spawn_owner(&f, 1, FAST);
		unsigned int i, ended = 0;
		int head;

		for (i = 0; *flags && i < 5000; i++)
			usleep(1000);
		CHECK(!*flags, "the owner does not look at its ring");
		memset(f.mem + DATA_AT, 0, LARGE * LARGE_BYTES);
		for (i = 0; i < LARGE; i++)
			CHECK(start(&f, 0, VIRTIO_BLK_T_IN, i * 128,
				    DATA_AT + i * LARGE_BYTES, LARGE_BYTES) >= 0, "no room");
		kick_always(&f, 0);
		/* The worker asks for no kicks while it takes requests. */
		while (!*flags && *used == before)
			;
		usleep(round * 100);
		kill_owner(pid);
		while ((head = reap(&f, 0, NULL)) >= 0) {
			CHECK(*status_of(&f, 0, head) == OK, "round %d: status %u", round,
			      *status_of(&f, 0, head));
			ended++;
		}
		cut += ended < LARGE;
		pid = spawn_owner(&f, 1, FAST);
		for (; ended < LARGE; ended++) {
			head = reap_wait(&f, 0, NULL);
			CHECK(*status_of(&f, 0, head) == OK, "round %d, later: status %u", round,
			      *status_of(&f, 0, head));
		}
		CHECK(holds(f.mem + DATA_AT, 0, LARGE * LARGE_BYTES, 9), "round %d: data", round);
		kill_owner(pid);
	}
	CHECK(cut, "each kill came too late");
}

/*
 * Kills the owner while its worker returns many requests at once.  The worker
 * has not touched the buffers yet, so each needs page faults, which fail while
 * the signal is pending.
 */
static void while_returning(void)
{
	const unsigned int n = LARGE, bytes = LARGE_BYTES;
	struct front f = { .mem = front_memory(), .nq = QUEUES };
	int late = 0;

	prepare_large(SLOW);
	front_fds(&f, QUEUES);
	front_rings(&f, true);
	for (int round = 0; round < 4; round++) {
		volatile uint16_t *used = &f.rings[0].v.used->idx;
		uint16_t before = *used;
		pid_t pid = spawn_owner(&f, 1, SLOW);

		for (unsigned int i = 0; i < n; i++) {
			memset(f.mem + DATA_AT + i * (bytes + 4096), 0, bytes + 8);
			CHECK(start(&f, 0, VIRTIO_BLK_T_IN, i * 128,
				    DATA_AT + i * (bytes + 4096) + 5, bytes) >= 0, "no room");
		}
		kick_always(&f, 0);
		while (*used == before)
			;
		CHECK(!kill(pid, SIGKILL), "kill: %m");
		late += (uint16_t)(before + n - *used);
		kill_owner(pid);
		CHECK((uint16_t)(*used - before) == n, "round %d: %u of %u requests ended",
		      round, (uint16_t)(*used - before), n);
		for (unsigned int i = 0; i < n; i++) {
			uint32_t len;
			int head = reap(&f, 0, &len);

			CHECK(*status_of(&f, 0, head) == OK && len == bytes + 1,
			      "round %d: status %u, len %u", round, *status_of(&f, 0, head), len);
			CHECK(holds(f.mem + DATA_AT + i * (bytes + 4096) + 5, i * 128, bytes, 9),
			      "round %d: wrong data", round);
		}
	}
	CHECK(late, "each kill came too late");
}

static void load_tasks(void)
{
	under_load(1);
}

static void load_kthreads(void)
{
	under_load(0);
}

/* An owner that is killed before it has started, or while it stops. */
static void half_way(void)
{
	for (int step = 0; step < 6; step++) {
		struct front f = { .mem = front_memory(), .nq = QUEUES };
		pid_t pid = fork();

		if (!pid) {
			front_fds(&f, QUEUES);
			become_owner(&f, 1);
			if (step > 0)
				front_setup(&f, QUEUES, USUAL_FEATURES, true);
			if (step > 1)
				CHECK(!front_backend(&f, SLOW), "SET_BACKEND: %m");
			if (step > 2)
				CHECK(!ioctl(f.fd, VHOST_BLK_START), "START: %m");
			if (step > 3) {
				start(&f, 0, VIRTIO_BLK_T_IN, 0, DATA_AT, 4096);
				kick_always(&f, 0);
				usleep(50000);
			}
			if (step > 4 && !fork())
				_exit(0);
			if (step > 4)
				ioctl(f.fd, VHOST_BLK_STOP);
			for (;;)
				pause();
		}
		usleep(100000 + step * 20000);
		kill_owner(pid);
	}
}

const struct test kill_tests[] = {
	{ "killed-in-flight", in_flight_tasks },
	{ "killed-in-flight-kthreads", in_flight_kthreads },
	{ "killed-under-load", load_tasks },
	{ "killed-under-load-kthreads", load_kthreads },
	{ "killed-while-taking", while_taking },
	{ "killed-while-returning", while_returning },
	{ "killed-half-way", half_way },
	{ NULL, NULL },
};
