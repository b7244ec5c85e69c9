// SPDX-License-Identifier: GPL-2.0-only
/*
 * A checked request becomes one bio after the other.
 *
 *   start.c -> window -> bio -> go_on -> window -> ... -> status
 *
 * A window is what one bio transfers.
 */
#include <linux/bio.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "internal.h"

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

/*
 * Submits the next window: -EINPROGRESS.  0 if nothing is left, -EINTR if the
 * killed worker cannot do it, otherwise an error that ends the request.
 */
int vblk_next_window(struct vblk_request *req)
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
 * worker: then the workqueue has to call this function again.
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
