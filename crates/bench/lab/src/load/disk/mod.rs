//! Loads on one disk: directly, by fio, through a virtqueue in this process, or through a server's socket.

pub(crate) mod test_file;

pub(crate) mod test_files;

pub(crate) mod images;

pub(crate) mod served;

pub(crate) mod driver;

pub(crate) mod bare;

pub(crate) mod fio;

pub(crate) mod fio_jobs;

mod program;

pub(crate) mod qemu_img;

pub(crate) mod copy_loop;

pub(crate) mod clients;

pub(crate) mod clients_together;
