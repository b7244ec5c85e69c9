// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the tests of vhost_blk.  Each test is a process of its own.
 *
 *   vhost-blk-test [-d DISK]... [NAME-PREFIX]...
 *
 * It prints `ok NAME` or `FAIL NAME: why`, and a summary.  Tests named data-*
 * run once per disk.
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <poll.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "front.h"

#define LIMIT_MS 90000

const char *disk_under_test;
static char *reason;
static int passed, failed;

void fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(reason, 4096, format, args);
	va_end(args);
	_exit(1);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void run(const struct test *test)
{
	int fd, status = 0;
	struct pollfd ended;
	double begin = now();
	char name[128];
	sigset_t set;
	pid_t child;

	snprintf(name, sizeof(name), "%s%s%s", test->name,
		 disk_under_test ? "-on-" : "",
		 disk_under_test ? strrchr(disk_under_test, '/') + 1 : "");
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	fd = signalfd(-1, &set, SFD_CLOEXEC);
	reason[0] = 0;
	fflush(stdout);
	child = fork();
	if (!child) {
		sigprocmask(SIG_UNBLOCK, &set, NULL);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(fd);
		test->run();
		_exit(0);
	}
	ended = (struct pollfd){ fd, POLLIN, 0 };
	while (waitpid(child, &status, WNOHANG) == 0) {
		struct signalfd_siginfo info;

		if (poll(&ended, 1, LIMIT_MS) == 0) {
			snprintf(reason, 4096, "not finished after %d s", LIMIT_MS / 1000);
			kill(child, SIGKILL);
			sleep(1);
			waitpid(child, &status, WNOHANG);
			status = -1;
			break;
		}
		if (read(fd, &info, sizeof(info)) < 0)
			break;
	}
	close(fd);
	if (status) {
		if (!reason[0])
			snprintf(reason, 4096, "the test ended with status 0x%x", status);
		printf("FAIL %s: %s\n", name, reason);
		failed++;
	} else {
		printf("ok %s (%.1f s)\n", name, now() - begin);
		passed++;
	}
}

static bool wanted(const char *name, char **prefixes)
{
	if (!*prefixes)
		return true;
	for (; *prefixes; prefixes++)
		if (!strncmp(name, *prefixes, strlen(*prefixes)))
			return true;
	return false;
}

static void run_all(const struct test *tests, char **prefixes)
{
	for (; tests->name; tests++)
		if (wanted(tests->name, prefixes))
			run(tests);
}

int main(int argc, char **argv)
{
	const char *disks[8];
	int nr_disks = 0, option;

	reason = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	while ((option = getopt(argc, argv, "d:")) != -1) {
		if (option != 'd' || nr_disks == 8)
			return 2;
		disks[nr_disks++] = optarg;
	}
	for (int i = 0; i < nr_disks; i++) {
		disk_under_test = disks[i];
		run_all(data_tests, argv + optind);
	}
	disk_under_test = NULL;
	run_all(hostile_tests, argv + optind);
	run_all(life_tests, argv + optind);
	run_all(kill_tests, argv + optind);
	printf("%d passed, %d failed\n", passed, failed);
	return failed || !passed;
}
