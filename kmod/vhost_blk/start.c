// SPDX-License-Identifier: GPL-2.0-only
/*
 * Checks a chain and starts the request in it, or answers it at once.
 *
 * Guest memory is read once: the header and the ranges are copied, and only
 * the copies are checked and used.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "internal.h"

/* Copies iovecs without their first @skip bytes, up to @bytes bytes. */
static unsigned int vblk_copy_iov(struct iovec *to, const struct iovec *from,
				  unsigned int nr, size_t skip, size_t bytes)
{
	unsigned int n = 0;

	for (; nr && bytes; nr--, from++) {
		size_t len = from->iov_len;

		if (skip >= len) {
			skip -= len;
			continue;
		}
		len = min(len - skip, bytes);
		to[n].iov_base = from->iov_base + skip;
		to[n++].iov_len = len;
		bytes -= len;
		skip = 0;
	}
	return n;
}

/* Whether the device can transfer from and to these buffers. */
static bool vblk_aligned(struct block_device *bdev, const struct iovec *iov,
			 unsigned int nr)
{
	unsigned long address = bdev_dma_alignment(bdev);
	unsigned long length = bdev_logical_block_size(bdev) - 1;

	for (; nr; nr--, iov++)
		if ((unsigned long)iov->iov_base & address || iov->iov_len & length)
			return false;
	return true;
}

static bool vblk_in_range(const struct vblk_queue *q, u64 sector, u64 bytes)
{
	u64 capacity = READ_ONCE(q->disk->capacity);
	u64 sectors = bytes >> SECTOR_SHIFT;
	u32 mask = bdev_logical_block_size(q->disk->bdev) - 1;

	if (bytes & mask || (sector << SECTOR_SHIFT) & mask)
		return false;
	return sectors <= capacity && sector <= capacity - sectors;
}

/* Whether a write must be durable when it ends. */
static bool vblk_write_through(struct vblk_queue *q)
{
	return !vhost_has_feature(&q->vq, VIRTIO_BLK_F_FLUSH) ||
	       q->disk->flags & VHOST_BLK_WRITE_THROUGH;
}

static struct vblk_request *vblk_request_new(struct vblk_queue *q,
					     struct vblk_chain *chain, u32 type,
					     unsigned int nr_iov, size_t nr_pages)
{
	struct vblk_request *req;
	size_t size = struct_size(req, iov, nr_iov);

	nr_pages = min_t(size_t, nr_pages, VBLK_WINDOW_PAGES);
	req = kvzalloc(size_add(size, nr_pages * sizeof(*req->pages)),
		       GFP_KERNEL_ACCOUNT);
	if (!req)
		return NULL;
	req->pages = (void *)req + size;
	req->max_pages = nr_pages;
	req->queue = q;
	req->bdev = q->disk->bdev;
	req->status = chain->status;
	req->head = chain->head;
	req->type = type;
	req->fua = vblk_write_through(q);
	return req;
}

/* Counts the request before its bio can end, and runs its first step. */
static int vblk_launch(struct vblk_request *req)
{
	struct vblk_queue *q = req->queue;
	int ret;

	WRITE_ONCE(q->in_flight, q->in_flight + 1);
	q->pages += req->max_pages;
	ret = vblk_next_window(req);
	if (ret != -EINPROGRESS) {
		/* vblk_request_go_on tries again, or finds nothing to do. */
		if (ret && ret != -EINTR)
			req->error = BLK_STS_IOERR;
		vblk_ended(req);
	}
	return -EINPROGRESS;
}

static int vblk_start_data(struct vblk_queue *q, struct vblk_chain *chain,
			   u32 type, u64 sector)
{
	bool in = type == VIRTIO_BLK_T_IN;
	size_t skip = in ? 0 : sizeof(struct virtio_blk_outhdr);
	size_t bytes = in ? chain->in_bytes : chain->out_bytes - skip;
	unsigned int nr = in ? chain->nr_in : chain->nr_out;
	struct vblk_request *req;
	size_t pages = 0;
	unsigned int i;

	if (!in && q->disk->flags & VHOST_BLK_READ_ONLY)
		return VIRTIO_BLK_S_IOERR;
	if (bytes > VBLK_MAX_BYTES || !vblk_in_range(q, sector, bytes))
		return VIRTIO_BLK_S_IOERR;
	if (!bytes)
		return VIRTIO_BLK_S_OK;
	for (i = 0; i < nr; i++)
		pages += vblk_pages_of((in ? chain->in : chain->out) + i);
	req = vblk_request_new(q, chain, type, nr, pages);
	if (!req)
		return VIRTIO_BLK_S_IOERR;
	nr = vblk_copy_iov(req->iov, in ? chain->in : chain->out, nr, skip, bytes);
	req->bounced = !vblk_aligned(req->bdev, req->iov, nr);
	if (req->bounced)
		req->max_pages = min_t(u32, req->max_pages, VBLK_BOUNCE_PAGES);
	iov_iter_init(&req->iter, in ? ITER_DEST : ITER_SOURCE, req->iov, nr, bytes);
	req->sector = sector;
	req->left = bytes;
	return vblk_launch(req);
}

static int vblk_start_flush(struct vblk_queue *q, struct vblk_chain *chain)
{
	struct vblk_request *req =
		vblk_request_new(q, chain, VIRTIO_BLK_T_FLUSH, 0, 0);

	if (!req)
		return VIRTIO_BLK_S_IOERR;
	req->flush_last = true;
	return vblk_launch(req);
}

static int vblk_check_ranges(struct vblk_queue *q, struct vblk_request *req)
{
	unsigned int i;

	for (i = 0; i < req->nr_ranges; i++) {
		u32 allowed = 0;

		if (req->type == VIRTIO_BLK_T_WRITE_ZEROES)
			allowed = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
		if (le32_to_cpu(req->ranges[i].flags) & ~allowed)
			return VIRTIO_BLK_S_UNSUPP;
	}
	for (i = 0; i < req->nr_ranges; i++) {
		req->range = i;
		vblk_load_range(req);
		if (!vblk_in_range(q, req->sector, req->left))
			return VIRTIO_BLK_S_IOERR;
	}
	req->range = 0;
	vblk_load_range(req);
	return VIRTIO_BLK_S_OK;
}

static int vblk_start_ranges(struct vblk_queue *q, struct vblk_chain *chain,
			     u32 type, struct iov_iter *from)
{
	size_t size = sizeof(struct virtio_blk_discard_write_zeroes);
	size_t nr = iov_iter_count(from) / size;
	struct vblk_request *req;
	int ret;

	if (type == VIRTIO_BLK_T_DISCARD && !bdev_max_discard_sectors(q->disk->bdev))
		return VIRTIO_BLK_S_UNSUPP;
	if (q->disk->flags & VHOST_BLK_READ_ONLY)
		return VIRTIO_BLK_S_IOERR;
	if (iov_iter_count(from) % size || !nr || nr > VBLK_MAX_RANGES)
		return VIRTIO_BLK_S_IOERR;
	req = vblk_request_new(q, chain, type, 0, 0);
	if (!req)
		return VIRTIO_BLK_S_IOERR;
	/* The block layer has no FUA for these commands. */
	req->flush_last = vblk_write_through(q);
	ret = VIRTIO_BLK_S_IOERR;
	req->nr_ranges = nr;
	req->ranges = kmalloc_array(nr, size, GFP_KERNEL_ACCOUNT);
	if (!req->ranges)
		goto free;
	if (!copy_from_iter_full(req->ranges, nr * size, from)) {
		if (vblk_dying())
			ret = -EINTR;
		goto free;
	}
	ret = vblk_check_ranges(q, req);
	if (ret == VIRTIO_BLK_S_OK)
		return vblk_launch(req);
free:
	vblk_request_free(req);
	return ret;
}

static int vblk_get_id(struct vblk_queue *q, struct vblk_chain *chain, u32 *written)
{
	struct iov_iter to;
	size_t len = min_t(size_t, chain->in_bytes, VHOST_BLK_SERIAL_BYTES);

	iov_iter_init(&to, ITER_DEST, chain->in, chain->nr_in, len);
	if (copy_to_iter(q->disk->serial, len, &to) != len)
		return vblk_dying() ? -EINTR : VIRTIO_BLK_S_IOERR;
	*written = len;
	return VIRTIO_BLK_S_OK;
}

/*
 * Starts a request, or returns it at once if it needs no bio.  Returns -EINTR
 * if a killed worker could do neither, otherwise 0.
 */
int vblk_request_start(struct vblk_queue *q, struct vblk_chain *chain)
{
	struct virtio_blk_outhdr header;
	struct iov_iter from;
	u32 written = 0;
	int ret;

	iov_iter_init(&from, ITER_SOURCE, chain->out, chain->nr_out,
		      chain->out_bytes);
	/* This also fails if the readable part is shorter than a header. */
	if (!copy_from_iter_full(&header, sizeof(header), &from)) {
		ret = vblk_dying() ? -EINTR : VIRTIO_BLK_S_IOERR;
	} else {
		u32 type = vhost32_to_cpu(&q->vq, header.type);
		u64 sector = vhost64_to_cpu(&q->vq, header.sector);

		switch (type) {
		case VIRTIO_BLK_T_IN:
		case VIRTIO_BLK_T_OUT:
			ret = vblk_start_data(q, chain, type, sector);
			break;
		case VIRTIO_BLK_T_FLUSH:
			ret = vblk_start_flush(q, chain);
			break;
		case VIRTIO_BLK_T_DISCARD:
		case VIRTIO_BLK_T_WRITE_ZEROES:
			ret = vblk_start_ranges(q, chain, type, &from);
			break;
		case VIRTIO_BLK_T_GET_ID:
			ret = vblk_get_id(q, chain, &written);
			break;
		default:
			ret = VIRTIO_BLK_S_UNSUPP;
		}
	}
	if (ret == -EINPROGRESS)
		return 0;
	if (ret < 0)
		return ret;
	return vblk_return(q, chain->head, chain->status, ret, written + 1);
}
