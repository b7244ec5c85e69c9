// SPDX-License-Identifier: GPL-2.0-only
/*
 * One request: checks it, and turns it into one bio after the other.
 *
 *   start -> window -> bio -> go_on -> window -> ... -> status
 *
 * A window is what one bio transfers.  Guest memory is read once: the header
 * and the ranges are copied, and only the copies are checked and used.
 */
#include <linux/bio.h>
#include <linux/log2.h>
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

static size_t vblk_pages_of(const struct iovec *iov)
{
	size_t offset = offset_in_page(iov->iov_base);

	return DIV_ROUND_UP(offset + iov->iov_len, PAGE_SIZE);
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

void vblk_request_free(struct vblk_request *req)
{
	kfree(req->ranges);
	kvfree(req);
}

static void vblk_end_io(struct bio *bio)
{
	struct vblk_request *req = bio->bi_private;

	req->error = bio->bi_status;
	bio_put(bio);
	vblk_ended(req);
}

static struct bio *vblk_bio(struct vblk_request *req, blk_opf_t opf,
			    unsigned int nr_vecs)
{
	struct bio *bio = bio_alloc(req->bdev, nr_vecs, opf, GFP_KERNEL);

	bio->bi_iter.bi_sector = req->sector;
	bio->bi_private = req;
	bio->bi_end_io = vblk_end_io;
	return bio;
}

static int vblk_submit(struct vblk_request *req, struct bio *bio, u32 bytes)
{
	req->window = bytes;
	req->in_window = true;
	/* The queue's mutex keeps the request until the caller lets go of it. */
	submit_bio(bio);
	return -EINPROGRESS;
}

/* Gives the pages of the window back. */
static void vblk_put_pages(struct vblk_request *req)
{
	unsigned int i;

	if (req->bounced) {
		for (i = 0; i < req->nr_pages; i++)
			__free_page(req->pages[i]);
	} else {
		unpin_user_pages_dirty_lock(req->pages, req->nr_pages,
					    req->type == VIRTIO_BLK_T_IN);
	}
	req->nr_pages = 0;
}

/*
 * The number of bytes of the next window: whole blocks, in at most max_pages
 * pages.  The buffers are aligned.
 */
static size_t vblk_window_bytes(const struct vblk_request *req)
{
	const struct iovec *iov = iter_iov(&req->iter);
	size_t skip = req->iter.iov_offset, left = req->left, bytes = 0;
	u32 block = bdev_logical_block_size(req->bdev);
	size_t pages = req->max_pages;

	for (; left && pages; iov++) {
		struct iovec part = {
			.iov_base = iov->iov_base + skip,
			.iov_len = min(iov->iov_len - skip, left),
		};
		size_t need = vblk_pages_of(&part);

		if (need > pages) {
			size_t fits = pages * PAGE_SIZE -
				      offset_in_page(part.iov_base);

			bytes += round_down(fits, block);
			break;
		}
		bytes += part.iov_len;
		left -= part.iov_len;
		pages -= need;
		skip = 0;
	}
	return bytes;
}

/* Pins the window's guest memory and adds it to the bio. */
static int vblk_pin(struct vblk_request *req, struct bio *bio, size_t bytes)
{
	while (bytes) {
		struct page **pages = req->pages + req->nr_pages;
		size_t offset;
		ssize_t got;

		if (req->nr_pages == req->max_pages)
			return -EIO;
		got = iov_iter_extract_pages(&req->iter, &pages, bytes,
					     req->max_pages - req->nr_pages, 0,
					     &offset);
		if (got <= 0)
			return got ? got : -EFAULT;
		bytes -= got;
		while (got) {
			unsigned int len = min_t(size_t, got, PAGE_SIZE - offset);

			/* The page is in the list before it can fail. */
			if (bio_add_page(bio, req->pages[req->nr_pages++], len,
					 offset) != len) {
				/* Extracted pages are consecutive. */
				got -= len;
				req->nr_pages += DIV_ROUND_UP(got, PAGE_SIZE);
				return -EIO;
			}
			got -= len;
			offset = 0;
		}
	}
	return 0;
}

/* Allocates the window's pages, fills them for a write, adds them to the bio. */
static int vblk_bounce(struct vblk_request *req, struct bio *bio, size_t bytes)
{
	while (bytes) {
		unsigned int len = min_t(size_t, bytes, PAGE_SIZE);
		/* A disk may claim to have read and leave the page as it is. */
		struct page *page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);

		if (!page)
			return -ENOMEM;
		req->pages[req->nr_pages++] = page;
		if (req->type == VIRTIO_BLK_T_OUT &&
		    !copy_from_iter_full(page_address(page), len, &req->iter))
			return -EFAULT;
		if (bio_add_page(bio, page, len, 0) != len)
			return -EIO;
		bytes -= len;
	}
	return 0;
}

static int vblk_next_data(struct vblk_request *req)
{
	bool in = req->type == VIRTIO_BLK_T_IN;
	blk_opf_t opf = REQ_SYNC | REQ_IDLE;
	/* Each window starts again where the last one was complete. */
	struct iov_iter saved = req->iter;
	struct bio *bio;
	size_t bytes;
	int ret;

	opf |= in ? REQ_OP_READ : REQ_OP_WRITE;
	if (!in && req->fua)
		opf |= REQ_FUA;
	if (req->bounced)
		bytes = min_t(u64, req->left,
			      round_down(req->max_pages * PAGE_SIZE,
					 bdev_logical_block_size(req->bdev)));
	else
		bytes = vblk_window_bytes(req);
	if (!bytes)
		return -EIO;
	bio = vblk_bio(req, opf, req->max_pages);
	if (req->bounced)
		ret = vblk_bounce(req, bio, bytes);
	else
		ret = vblk_pin(req, bio, bytes);
	if (!ret)
		return vblk_submit(req, bio, bytes);
	bio_put(bio);
	vblk_put_pages(req);
	req->iter = saved;
	return vblk_dying() ? -EINTR : -EIO;
}

/* Writes zeroes as data. */
static int vblk_next_zero_pages(struct vblk_request *req)
{
	u32 bytes = min_t(u64, req->left, VBLK_WINDOW_PAGES * PAGE_SIZE);
	struct bio *bio = vblk_bio(req, REQ_OP_WRITE | REQ_SYNC | REQ_IDLE,
				   VBLK_WINDOW_PAGES);
	u32 added = 0;

	while (added < bytes) {
		u32 len = min_t(u32, bytes - added, PAGE_SIZE);

		if (bio_add_page(bio, ZERO_PAGE(0), len, 0) != len) {
			bio_put(bio);
			return -EIO;
		}
		added += len;
	}
	return vblk_submit(req, bio, bytes);
}

/* A part of the current range: one bio without data, or one with zeroes. */
static int vblk_next_part_of_range(struct vblk_request *req)
{
	u32 flags = le32_to_cpu(req->ranges[req->range].flags);
	blk_opf_t opf = REQ_OP_DISCARD;
	struct bio *bio;
	u64 limit;
	u32 bytes;

	if (req->type == VIRTIO_BLK_T_DISCARD) {
		limit = bdev_max_discard_sectors(req->bdev);
	} else {
		opf = REQ_OP_WRITE_ZEROES;
		if (!(flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP))
			opf |= REQ_NOUNMAP;
		limit = bdev_write_zeroes_sectors(req->bdev);
		if (!limit || req->write_zero_pages)
			return vblk_next_zero_pages(req);
	}
	limit = min_t(u64, limit << SECTOR_SHIFT, SZ_1G);
	bytes = min_t(u64, req->left,
		      round_down(limit, bdev_logical_block_size(req->bdev)));
	if (!bytes)
		return -EOPNOTSUPP;
	bio = vblk_bio(req, opf, 0);
	bio->bi_iter.bi_size = bytes;
	return vblk_submit(req, bio, bytes);
}

static int vblk_flush(struct vblk_request *req)
{
	req->flush_last = false;
	req->sector = 0;
	return vblk_submit(req, vblk_bio(req, REQ_OP_WRITE | REQ_PREFLUSH, 0), 0);
}

static void vblk_load_range(struct vblk_request *req)
{
	const struct virtio_blk_discard_write_zeroes *range =
		&req->ranges[req->range];

	req->sector = le64_to_cpu(range->sector);
	req->left = (u64)le32_to_cpu(range->num_sectors) << SECTOR_SHIFT;
}

/*
 * Submits the next window: -EINPROGRESS.  0 if nothing is left, -EINTR if the
 * killed worker cannot do it, otherwise an error that ends the request.
 */
static int vblk_next_window(struct vblk_request *req)
{
	while (!req->left) {
		if (req->range + 1 >= req->nr_ranges)
			return req->flush_last ? vblk_flush(req) : 0;
		req->range++;
		vblk_load_range(req);
	}
	return req->ranges ? vblk_next_part_of_range(req) : vblk_next_data(req);
}

/* Copies what has been read to the guest's memory. */
static int vblk_copy_out(struct vblk_request *req)
{
	struct iov_iter saved = req->iter;
	size_t left = req->window;
	unsigned int i;

	for (i = 0; i < req->nr_pages && left; i++) {
		size_t len = min_t(size_t, left, PAGE_SIZE);

		if (copy_to_iter(page_address(req->pages[i]), len,
				 &req->iter) != len) {
			req->iter = saved;
			return vblk_dying() ? -EINTR : -EFAULT;
		}
		left -= len;
	}
	return 0;
}

/*
 * Handles the end of a request's bio.  Returns 0 if the request has ended,
 * -EINPROGRESS if another bio is in flight, -EINTR if the caller is a killed
 * worker and somebody else has to call this function again.
 */
int vblk_request_go_on(struct vblk_request *req)
{
	int ret;

	if (req->in_window) {
		if (req->bounced && !req->error && req->type == VIRTIO_BLK_T_IN) {
			ret = vblk_copy_out(req);
			if (ret == -EINTR)
				return ret;
			if (ret)
				req->error = BLK_STS_IOERR;
		}
		vblk_put_pages(req);
		req->in_window = false;
		if (req->error == BLK_STS_NOTSUPP && !req->write_zero_pages &&
		    req->type == VIRTIO_BLK_T_WRITE_ZEROES) {
			/* The device has no such command after all. */
			req->error = BLK_STS_OK;
			req->write_zero_pages = true;
		} else if (!req->error) {
			req->sector += req->window >> SECTOR_SHIFT;
			req->left -= req->window;
			if (req->type == VIRTIO_BLK_T_IN)
				req->written += req->window;
		}
	}
	if (req->error)
		return 0;
	ret = vblk_next_window(req);
	if (ret && ret != -EINPROGRESS && ret != -EINTR) {
		req->error = errno_to_blk_status(ret);
		ret = 0;
	}
	return ret;
}

u8 vblk_request_status(const struct vblk_request *req)
{
	switch (req->error) {
	case BLK_STS_OK:
		return VIRTIO_BLK_S_OK;
	case BLK_STS_NOTSUPP:
		return VIRTIO_BLK_S_UNSUPP;
	default:
		return VIRTIO_BLK_S_IOERR;
	}
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
