// SPDX-License-Identifier: GPL-2.0-only
/*
 * vhost_blk: serves a virtio-blk device's rings from a block device.
 *
 * This file: the character device and its ioctls.  Each open file is a disk.
 * The usual vhost ioctls set up memory, rings, eventfds and workers;
 * vhost_blk.h has the rest.
 */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/nospec.h>
#include <linux/slab.h>

#include "internal.h"

/* No VHOST_F_LOG_ALL: the pages that reads write to are not logged. */
static const u64 vblk_features =
	BIT_ULL(VIRTIO_F_NOTIFY_ON_EMPTY) | BIT_ULL(VIRTIO_F_ANY_LAYOUT) |
	BIT_ULL(VIRTIO_RING_F_INDIRECT_DESC) | BIT_ULL(VIRTIO_RING_F_EVENT_IDX) |
	BIT_ULL(VIRTIO_F_VERSION_1) | BIT_ULL(VIRTIO_BLK_F_SIZE_MAX) |
	BIT_ULL(VIRTIO_BLK_F_SEG_MAX) | BIT_ULL(VIRTIO_BLK_F_RO) |
	BIT_ULL(VIRTIO_BLK_F_BLK_SIZE) | BIT_ULL(VIRTIO_BLK_F_FLUSH) |
	BIT_ULL(VIRTIO_BLK_F_TOPOLOGY) | BIT_ULL(VIRTIO_BLK_F_CONFIG_WCE) |
	BIT_ULL(VIRTIO_BLK_F_MQ) | BIT_ULL(VIRTIO_BLK_F_DISCARD) |
	BIT_ULL(VIRTIO_BLK_F_WRITE_ZEROES);

static void vblk_stop(struct vblk_disk *disk)
{
	int i;

	for (i = 0; i < VHOST_BLK_MAX_QUEUES; i++)
		vblk_queue_stop(disk->queues[i]);
	vblk_drain(disk);
	disk->running = false;
}

static int vblk_start(struct vblk_disk *disk)
{
	bool any = false;
	int i, ret;

	if (disk->running)
		return -EBUSY;
	if (!disk->bdev)
		return -ENODEV;
	for (i = 0; i < VHOST_BLK_MAX_QUEUES; i++) {
		ret = vblk_queue_start(disk->queues[i]);
		if (ret == -ENOENT)
			continue;
		if (ret) {
			vblk_stop(disk);
			return ret;
		}
		any = true;
	}
	disk->running = any;
	return any ? 0 : -EINVAL;
}

/* Opens the block device behind a descriptor for this disk alone. */
static struct file *vblk_claim(struct vblk_disk *disk, int fd)
{
	bool write = !(disk->flags & VHOST_BLK_READ_ONLY);
	struct file *given = fget(fd);
	struct file *own = ERR_PTR(-ENOTBLK);
	struct inode *inode;

	if (!given)
		return ERR_PTR(-EBADF);
	inode = file_inode(given);
	if (!S_ISBLK(inode->i_mode))
		goto out;
	own = ERR_PTR(-EACCES);
	if (!(given->f_mode & FMODE_READ) ||
	    (write && !(given->f_mode & FMODE_WRITE)))
		goto out;
	own = bdev_file_open_by_dev(inode->i_rdev, BLK_OPEN_READ |
				    (write ? BLK_OPEN_WRITE : 0), disk, NULL);
out:
	fput(given);
	return own;
}

static void vblk_unclaim(struct vblk_disk *disk)
{
	if (disk->bdev_file)
		bdev_fput(disk->bdev_file);
	disk->bdev_file = NULL;
	disk->bdev = NULL;
	WRITE_ONCE(disk->capacity, 0);
}

static int vblk_set_backend(struct vblk_disk *disk, int fd)
{
	bool running = disk->running;
	struct block_device *bdev;
	struct file *file = NULL;
	int ret = 0;

	if (fd != -1) {
		file = vblk_claim(disk, fd);
		if (IS_ERR(file))
			return PTR_ERR(file);
		bdev = file_bdev(file);
		ret = -EOPNOTSUPP;
		if (bdev_is_zoned(bdev))
			goto give_back;
		ret = -EACCES;
		if (bdev_read_only(bdev) && !(disk->flags & VHOST_BLK_READ_ONLY))
			goto give_back;
		/* From here on nothing goes through the page cache. */
		ret = sync_blockdev(bdev);
		if (ret)
			goto give_back;
		invalidate_bdev(bdev);
	}
	vblk_stop(disk);
	vblk_unclaim(disk);
	if (!file)
		return 0;
	disk->bdev_file = file;
	disk->bdev = bdev;
	WRITE_ONCE(disk->capacity, bdev_nr_sectors(bdev));
	return running ? vblk_start(disk) : 0;

give_back:
	bdev_fput(file);
	return ret;
}

static int vblk_set_flags(struct vblk_disk *disk, u32 flags)
{
	bool running = disk->running;

	if (flags & ~(VHOST_BLK_READ_ONLY | VHOST_BLK_WRITE_THROUGH))
		return -EOPNOTSUPP;
	/* The claim may not allow writing. */
	if (disk->bdev && (disk->flags & VHOST_BLK_READ_ONLY) &&
	    !(flags & VHOST_BLK_READ_ONLY))
		return -EBUSY;
	vblk_stop(disk);
	disk->flags = flags;
	return running ? vblk_start(disk) : 0;
}

static int vblk_set_features(struct vblk_disk *disk, u64 features)
{
	int i;

	if (features & ~vblk_features)
		return -EOPNOTSUPP;
	if (disk->running)
		return -EBUSY;
	for (i = 0; i < VHOST_BLK_MAX_QUEUES; i++) {
		struct vhost_virtqueue *vq = disk->vqs[i];

		mutex_lock(&vq->mutex);
		vq->acked_features = features;
		mutex_unlock(&vq->mutex);
	}
	return 0;
}

/*
 * The old memory may be unmapped when the ioctl returns, so no request may
 * still use it.
 */
static long vblk_set_memory(struct vblk_disk *disk, void __user *argp)
{
	bool running = disk->running;
	long ret, started;

	if (running)
		vblk_stop(disk);
	ret = vhost_dev_ioctl(&disk->dev, VHOST_SET_MEM_TABLE, argp);
	if (!running)
		return ret;
	started = vblk_start(disk);
	return ret ? ret : started;
}

/*
 * The driver may have missed signals on the last eventfd, so the new one of a
 * running queue gets one signal.
 */
static long vblk_set_call(struct vblk_disk *disk, void __user *argp)
{
	long ret = vhost_vring_ioctl(&disk->dev, VHOST_SET_VRING_CALL, argp);
	struct vhost_virtqueue *vq;
	u32 index;

	if (ret)
		return ret;
	if (get_user(index, (u32 __user *)argp))
		return -EFAULT;
	if (index >= VHOST_BLK_MAX_QUEUES)
		return -ENOBUFS;
	vq = disk->vqs[array_index_nospec(index, VHOST_BLK_MAX_QUEUES)];
	mutex_lock(&vq->mutex);
	if (vhost_vq_get_backend(vq) && vq->call_ctx.ctx)
		eventfd_signal(vq->call_ctx.ctx);
	mutex_unlock(&vq->mutex);
	return 0;
}

static long vblk_own_ioctl(struct vblk_disk *disk, unsigned int cmd,
			   void __user *argp)
{
	u8 serial[VHOST_BLK_SERIAL_BYTES];
	u32 flags;
	u64 value;
	s32 fd;

	switch (cmd) {
	case VHOST_BLK_SET_BACKEND:
		if (get_user(fd, (s32 __user *)argp))
			return -EFAULT;
		return vblk_set_backend(disk, fd);
	case VHOST_BLK_START:
		return vblk_start(disk);
	case VHOST_BLK_STOP:
		vblk_stop(disk);
		return 0;
	case VHOST_BLK_RESIZE:
		if (!disk->bdev)
			return -ENODEV;
		WRITE_ONCE(disk->capacity, bdev_nr_sectors(disk->bdev));
		return put_user(disk->capacity, (u64 __user *)argp);
	case VHOST_BLK_SET_SERIAL:
		if (disk->running)
			return -EBUSY;
		if (copy_from_user(serial, argp, sizeof(serial)))
			return -EFAULT;
		memcpy(disk->serial, serial, sizeof(serial));
		return 0;
	case VHOST_BLK_SET_FLAGS:
		if (get_user(flags, (u32 __user *)argp))
			return -EFAULT;
		return vblk_set_flags(disk, flags);
	case VHOST_BLK_RESCUED:
		value = atomic64_read(&vblk_rescued);
		return put_user(value, (u64 __user *)argp);
	case VHOST_SET_FEATURES:
		if (copy_from_user(&value, argp, sizeof(value)))
			return -EFAULT;
		return vblk_set_features(disk, value);
	case VHOST_SET_MEM_TABLE:
		return vblk_set_memory(disk, argp);
	case VHOST_SET_VRING_CALL:
		return vblk_set_call(disk, argp);
	/* Nothing is logged, so a log would be wrong. */
	case VHOST_SET_LOG_BASE:
	case VHOST_SET_LOG_FD:
		return -EOPNOTSUPP;
	default:
		return -ENOIOCTLCMD;
	}
}

static long vblk_locked_ioctl(struct vblk_disk *disk, unsigned int cmd,
			      void __user *argp)
{
	struct vhost_dev *dev = &disk->dev;
	long ret;

	switch (cmd) {
	case VHOST_NEW_WORKER:
	case VHOST_FREE_WORKER:
	case VHOST_ATTACH_VRING_WORKER:
	case VHOST_GET_VRING_WORKER:
		return vhost_worker_ioctl(dev, cmd, argp);
	}
	ret = vhost_dev_check_owner(dev);
	if (!ret) {
		ret = vblk_own_ioctl(disk, cmd, argp);
		if (ret != -ENOIOCTLCMD)
			return ret;
	}
	/* vhost decides what works without an owner. */
	ret = vhost_dev_ioctl(dev, cmd, argp);
	if (ret == -ENOIOCTLCMD)
		ret = vhost_vring_ioctl(dev, cmd, argp);
	return ret;
}

static long vblk_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct vblk_disk *disk = file->private_data;
	void __user *argp = (void __user *)arg;
	long ret;

	if (cmd == VHOST_GET_FEATURES)
		return copy_to_user(argp, &vblk_features, sizeof(vblk_features)) ?
		       -EFAULT : 0;
	mutex_lock(&disk->dev.mutex);
	ret = vblk_locked_ioctl(disk, cmd, argp);
	mutex_unlock(&disk->dev.mutex);
	return ret;
}

static void vblk_free(struct vblk_disk *disk)
{
	int i;

	for (i = 0; i < VHOST_BLK_MAX_QUEUES; i++)
		kvfree(disk->queues[i]);
	kfree(disk);
}

static int vblk_open(struct inode *inode, struct file *file)
{
	struct vblk_disk *disk = kzalloc(sizeof(*disk), GFP_KERNEL_ACCOUNT);
	int i;

	if (!disk)
		return -ENOMEM;
	init_waitqueue_head(&disk->drained);
	for (i = 0; i < VHOST_BLK_MAX_QUEUES; i++) {
		disk->queues[i] = vblk_queue_new(disk);
		if (!disk->queues[i]) {
			vblk_free(disk);
			return -ENOMEM;
		}
		disk->vqs[i] = &disk->queues[i]->vq;
	}
	vhost_dev_init(&disk->dev, disk->vqs, VHOST_BLK_MAX_QUEUES, UIO_MAXIOV,
		       VBLK_WEIGHT, VBLK_BYTE_WEIGHT, true, NULL);
	file->private_data = disk;
	return 0;
}

/* A disk's last file has been closed, perhaps because its owner was killed. */
static int vblk_release(struct inode *inode, struct file *file)
{
	struct vblk_disk *disk = file->private_data;
	int i;

	for (i = 0; i < VHOST_BLK_MAX_QUEUES; i++)
		vblk_queue_stop(disk->queues[i]);
	/* No kick arrives any more. */
	vhost_dev_stop(&disk->dev);
	/* The requests need the owner's memory, which vhost_dev_cleanup drops. */
	vblk_drain(disk);
	vhost_dev_cleanup(&disk->dev);
	vblk_unclaim(disk);
	vblk_free(disk);
	return 0;
}

static const struct file_operations vblk_fops = {
	.owner		= THIS_MODULE,
	.open		= vblk_open,
	.release	= vblk_release,
	.unlocked_ioctl	= vblk_ioctl,
	.compat_ioctl	= compat_ptr_ioctl,
	.llseek		= noop_llseek,
};

static struct miscdevice vblk_misc = {
	.minor	= MISC_DYNAMIC_MINOR,
	.name	= "vhost-blk",
	.fops	= &vblk_fops,
	.mode	= 0600,
};

static int __init vblk_init(void)
{
	int ret;

	vblk_rescue_wq = alloc_workqueue("vhost_blk", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	if (!vblk_rescue_wq)
		return -ENOMEM;
	ret = misc_register(&vblk_misc);
	if (ret)
		destroy_workqueue(vblk_rescue_wq);
	return ret;
}
module_init(vblk_init);

static void __exit vblk_exit(void)
{
	misc_deregister(&vblk_misc);
	destroy_workqueue(vblk_rescue_wq);
}
module_exit(vblk_exit);

MODULE_DESCRIPTION("vhost-blk of bareblk: virtio-blk rings served from a block device");
MODULE_AUTHOR("The bareblk contributors");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1");
