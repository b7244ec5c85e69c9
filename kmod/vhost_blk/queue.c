// SPDX-License-Identifier: GPL-2.0-only
/*
 * Rings: takes requests, returns them, starts, stops and drains queues.
 *
 *   kick eventfd -> worker -> vblk_kick -> vblk_request_start -> submit_bio
 *   interrupt -> vblk_ended -> worker, or the workqueue -> vblk_reap -> used ring
 *
 * A request counts as in flight from before its first bio until its entry is
 * in the used ring.  Both changes happen under the queue's mutex.
 */
#include <linux/mmu_context.h>
#include <linux/kthread.h>
#include <linux/slab.h>

#include "internal.h"

struct workqueue_struct *vblk_rescue_wq;
atomic64_t vblk_rescued = ATOMIC64_INIT(0);

static bool vblk_full(const struct vblk_queue *q)
{
	return q->in_flight >= VBLK_QUEUE_REQUESTS || q->pages >= VBLK_QUEUE_PAGES;
}

static void vblk_break(struct vblk_queue *q)
{
	q->broken = true;
	vq_err(&q->vq, "the queue stops because its ring is faulty\n");
}

/*
 * Writes the status byte and the used entry.  It returns -EINTR if the killed
 * worker could not write; nothing is lost then, and the call can be repeated.
 */
int vblk_return(struct vblk_queue *q, u16 head, u8 __user *status, u8 value,
		u32 written)
{
	struct vhost_virtqueue *vq = &q->vq;
	u16 used = vq->last_used_idx;

	if (put_user(value, status)) {
		if (vblk_dying())
			return -EINTR;
		vq_err(vq, "the status byte is not writable\n");
	}
	if (vhost_add_used(vq, head, written)) {
		/* vhost may have counted an entry that is not visible. */
		vq->last_used_idx = used;
		if (vblk_dying())
			return -EINTR;
		vblk_break(q);
	}
	q->signal = true;
	return 0;
}

/* Signals the driver if there are new used entries and it wants to know. */
static void vblk_signal(struct vblk_queue *q)
{
	if (q->signal)
		vhost_signal(&q->disk->dev, &q->vq);
	q->signal = false;
}

/* Describes the chain that vhost_get_vq_desc has put into vq->iov. */
static bool vblk_describe(struct vhost_virtqueue *vq, u16 head, unsigned int out,
			  unsigned int in, struct vblk_chain *chain)
{
	struct iovec *last;

	chain->head = head;
	chain->out = vq->iov;
	chain->nr_out = out;
	chain->out_bytes = iov_length(vq->iov, out);
	chain->in = vq->iov + out;
	chain->nr_in = in;
	chain->in_bytes = iov_length(vq->iov + out, in);
	if (!in || !chain->in_bytes)
		return false;
	/* vhost makes no entries of length 0. */
	last = &chain->in[in - 1];
	chain->status = last->iov_base + last->iov_len - 1;
	chain->in_bytes--;
	return true;
}

/* Takes requests until the ring is empty or a limit is reached. */
static void vblk_take(struct vblk_queue *q)
{
	struct vhost_virtqueue *vq = &q->vq;
	struct vhost_dev *dev = &q->disk->dev;
	unsigned int out, in;
	u64 bytes = 0;
	int taken = 0;

	vhost_disable_notify(dev, vq);
	/* A dying worker leaves requests in the ring for the next owner. */
	while (!q->broken && !vblk_dying()) {
		struct vblk_chain chain;
		int head, ret;

		if (vblk_full(q)) {
			q->starved = true;
			break;
		}
		head = vhost_get_vq_desc(vq, vq->iov, ARRAY_SIZE(vq->iov), &out,
					 &in, NULL, NULL);
		if (head < 0) {
			if (!vblk_dying())
				vblk_break(q);
			break;
		}
		if (head == vq->num) {
			if (likely(!vhost_enable_notify(dev, vq)))
				break;
			vhost_disable_notify(dev, vq);
			continue;
		}
		if (!vblk_describe(vq, head, out, in, &chain)) {
			vblk_break(q);
			break;
		}
		/* The next owner starts at the used index, so it takes this one. */
		ret = vblk_request_start(q, &chain);
		if (ret == -EINTR)
			break;
		bytes += chain.out_bytes + chain.in_bytes;
		if (vhost_exceeds_weight(vq, ++taken, min_t(u64, bytes, INT_MAX)))
			break;
	}
}

static void vblk_kick(struct vhost_work *work)
{
	struct vhost_virtqueue *vq =
		container_of(work, struct vhost_virtqueue, poll.work);
	struct vblk_queue *q = container_of(vq, struct vblk_queue, vq);
	struct blk_plug plug;

	mutex_lock(&vq->mutex);
	if (vhost_vq_get_backend(vq) && !q->broken) {
		blk_start_plug(&plug);
		vblk_take(q);
		blk_finish_plug(&plug);
		/* Requests that needed no bio have been returned. */
		vblk_signal(q);
	}
	mutex_unlock(&vq->mutex);
}

/*
 * Called when a request's bio has ended, in any context.  When the request is
 * in @done, another processor may return it and free the disk, except that
 * the disk's release waits for this RCU section.
 */
void vblk_ended(struct vblk_request *req)
{
	struct vblk_queue *q = req->queue;

	rcu_read_lock();
	llist_add(&req->node, &q->done);
	if (!vhost_vq_work_queue(&q->vq, &q->reap))
		queue_work(vblk_rescue_wq, &q->rescue);
	rcu_read_unlock();
}

/* Gives a request to the workqueue. */
static void vblk_defer(struct vblk_queue *q, struct vblk_request *req)
{
	llist_add(&req->node, &q->done);
	queue_work(vblk_rescue_wq, &q->rescue);
}

/* Returns the number of requests that have ended. */
static unsigned int vblk_reap(struct vblk_queue *q)
{
	struct vhost_virtqueue *vq = &q->vq;
	struct vblk_request *req, *next;
	struct llist_node *list;
	struct blk_plug plug;
	unsigned int ended = 0;

	mutex_lock(&vq->mutex);
	list = llist_reverse_order(llist_del_all(&q->done));
	blk_start_plug(&plug);
	llist_for_each_entry_safe(req, next, list, node) {
		int ret = vblk_request_go_on(req);

		if (ret == -EINPROGRESS)
			continue;
		if (ret == 0)
			ret = vblk_return(q, req->head, req->status,
					  vblk_request_status(req),
					  req->written + 1);
		if (ret == -EINTR) {
			vblk_defer(q, req);
			continue;
		}
		WRITE_ONCE(q->in_flight, q->in_flight - 1);
		q->pages -= req->max_pages;
		vblk_request_free(req);
		ended++;
	}
	blk_finish_plug(&plug);
	vblk_signal(q);
	if (ended) {
		if (!q->in_flight)
			wake_up_all(&q->disk->drained);
		if (q->starved && !vblk_full(q)) {
			q->starved = false;
			if (vhost_vq_get_backend(vq))
				vhost_poll_queue(&vq->poll);
		}
	}
	mutex_unlock(&vq->mutex);
	return ended;
}

static void vblk_reap_on_worker(struct vhost_work *work)
{
	vblk_reap(container_of(work, struct vblk_queue, reap));
}

/*
 * The owner's memory is still there: vhost holds it until the disk's release,
 * which comes after the drain.
 */
static void vblk_reap_on_workqueue(struct work_struct *work)
{
	struct vblk_queue *q = container_of(work, struct vblk_queue, rescue);
	struct mm_struct *mm = q->disk->dev.mm;

	kthread_use_mm(mm);
	atomic64_add(vblk_reap(q), &vblk_rescued);
	kthread_unuse_mm(mm);
}

struct vblk_queue *vblk_queue_new(struct vblk_disk *disk)
{
	struct vblk_queue *q = kvzalloc(sizeof(*q), GFP_KERNEL_ACCOUNT);

	if (!q)
		return NULL;
	q->disk = disk;
	q->vq.handle_kick = vblk_kick;
	init_llist_head(&q->done);
	vhost_work_init(&q->reap, vblk_reap_on_worker);
	INIT_WORK(&q->rescue, vblk_reap_on_workqueue);
	return q;
}

/*
 * Starts a queue that has a ring; returns -ENOENT if it has none.  The caller
 * holds dev.mutex, and no request is in flight.
 *
 * The position comes from the used ring: all requests before it have ended,
 * and none after it, because each owner drains.  The position that a front-end
 * remembers can be older than the last requests of a killed owner.
 */
int vblk_queue_start(struct vblk_queue *q)
{
	struct vhost_virtqueue *vq = &q->vq;
	int ret = -ENOENT;

	mutex_lock(&vq->mutex);
	if (!vq->desc && !vq->avail && !vq->used)
		goto out;
	ret = -EFAULT;
	if (!vhost_vq_is_setup(vq))
		goto out;
	vhost_vq_set_backend(vq, q->disk);
	ret = vhost_vq_init_access(vq);
	if (ret) {
		vhost_vq_set_backend(vq, NULL);
		goto out;
	}
	vq->last_avail_idx = vq->last_used_idx;
	vq->avail_idx = vq->last_used_idx;
	q->broken = false;
	q->starved = false;
	/* The driver may have missed the signal of the last owner's requests. */
	if (vq->call_ctx.ctx)
		eventfd_signal(vq->call_ctx.ctx);
	/* The driver may have kicked before. */
	vhost_poll_queue(&vq->poll);
out:
	mutex_unlock(&vq->mutex);
	return ret;
}

/* The queue takes no more requests.  Those in flight go on. */
void vblk_queue_stop(struct vblk_queue *q)
{
	mutex_lock(&q->vq.mutex);
	vhost_vq_set_backend(&q->vq, NULL);
	mutex_unlock(&q->vq.mutex);
}

static bool vblk_idle(struct vblk_disk *disk)
{
	int i;

	for (i = 0; i < VHOST_BLK_MAX_QUEUES; i++)
		if (READ_ONCE(disk->queues[i]->in_flight))
			return false;
	return true;
}

/*
 * Waits until the stopped queues have no request in flight, and until no code
 * of this module still runs for one of them.
 */
void vblk_drain(struct vblk_disk *disk)
{
	int i;

	wait_event(disk->drained, vblk_idle(disk));
	/* vblk_ended has left its RCU section, so it has queued its work. */
	synchronize_rcu();
	vhost_dev_flush(&disk->dev);
	for (i = 0; i < VHOST_BLK_MAX_QUEUES; i++)
		flush_work(&disk->queues[i]->rescue);
}
