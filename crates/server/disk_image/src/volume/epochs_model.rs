//! A loom model: no op uses a host cluster that was given to other data, however reading, freeing and reuse interleave.

use loom::cell::Cell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

use super::epochs::{Begun, Epochs, Oldest};

struct Disk {
    epochs: Epochs,
    oldest: Oldest,
    /// The entry leads to the cluster.
    is_linked: AtomicBool,
    /// loom notices an access while the cluster is used again.
    cluster: Cell<u32>,
}

fn read(disk: &Disk, begun: &mut Begun) {
    let op = begun.begin(&disk.epochs, &disk.oldest);
    if disk.is_linked.load(Ordering::Acquire) {
        assert_eq!(disk.cluster.get(), 1);
    }
    begun.end(op, &disk.oldest);
}

fn free_and_reuse(disk: &Disk) {
    disk.is_linked.store(false, Ordering::Release);
    let next = disk.epochs.begin_next();
    // Another look would only make the model longer.
    if disk.oldest.is_since(next) {
        disk.cluster.set(2);
    }
}

fn check(reads: usize) {
    loom::model(move || {
        let disk = Arc::new(Disk {
            epochs: Epochs::new(),
            oldest: Oldest::new(),
            is_linked: AtomicBool::new(true),
            cluster: Cell::new(1),
        });
        let reader = Arc::clone(&disk);
        let reader = thread::spawn(move || {
            let mut begun = Begun::default();
            (0..reads).for_each(|_| read(&reader, &mut begun));
        });
        free_and_reuse(&disk);
        reader.join().unwrap();
    });
}

#[test]
fn cluster_is_not_used_again_while_an_op_may_read_it() {
    check(2);
}

#[test]
fn op_that_begins_beside_another_is_waited_for_too() {
    loom::model(|| {
        let disk = Arc::new(Disk {
            epochs: Epochs::new(),
            oldest: Oldest::new(),
            is_linked: AtomicBool::new(true),
            cluster: Cell::new(1),
        });
        let reader = Arc::clone(&disk);
        let reader = thread::spawn(move || {
            let mut begun = Begun::default();
            let first = begun.begin(&reader.epochs, &reader.oldest);
            read(&reader, &mut begun);
            begun.end(first, &reader.oldest);
        });
        free_and_reuse(&disk);
        reader.join().unwrap();
    });
}
