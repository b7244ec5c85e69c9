//! Tests that need a whole machine: two NUMA nodes, control groups, CPUs that go offline.
//!
//! This program's tests run again in a guest with four CPUs; outside the guest, the tests below do nothing.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use blk_server::{CgroupError, WorkerOptions, WorkerOptionsError};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::bed::{Seen, start};
use super::on;
use crate::alone;
use crate::rig::{feature, ready};

const GROUPS: &str = "/sys/fs/cgroup";

#[cfg(target_arch = "x86_64")] // the guest tests need x86-64
#[test]
fn tests_pass_in_a_guest_with_two_nodes_and_control_groups() {
    use xtask::guest::{GuestImage, OwnTests};

    let image = GuestImage::prepare(|step| eprintln!("{step}")).unwrap();
    let tests = OwnTests::new(&image, env!("CARGO_TARGET_TMPDIR"), "tests_pass_in_a_guest")
        .only("worker_threads::")
        .on(4, 2);
    let passed = tests.run().unwrap_or_else(|error| panic!("{error:#}"));
    println!("{}: {} tests, {:?}", passed.kernel, passed.count, passed.output.wall);
    assert!(passed.count >= 13, "{}", passed.output.console);
    assert_eq!(passed.output.value("NODES"), Some("[0, 0, 1, 1]"));
    assert!(!passed.output.console.contains("skipped:"), "{}", passed.output.console);
}

/// Whether this runs in the guest, where the program is `/own-tests`.
fn in_guest() -> bool {
    let in_guest = std::env::current_exe().is_ok_and(|program| program == Path::new("/own-tests"));
    if !in_guest {
        xtask::skip::skip(xtask::skip::Reason::NotInAGuest, "");
    }
    in_guest
}

/// The NUMA node of `cpu`, from a different kernel file than bareblk reads.
fn node_of(cpu: u32) -> u32 {
    let links = fs::read_dir(format!("/sys/devices/system/cpu/cpu{cpu}")).unwrap();
    let names = links.map(|link| link.unwrap().file_name().into_string().unwrap());
    names.into_iter().find_map(|name| name.strip_prefix("node")?.parse().ok()).unwrap()
}

fn in_group(path: &str) -> WorkerOptions {
    WorkerOptions { cgroup: Some(path.into()), ..WorkerOptions::default() }
}

/// Mounts the control group hierarchy, and enables the controllers that threads can have.
fn groups() {
    if !Path::new(GROUPS).join("cgroup.procs").exists() {
        let status = std::process::Command::new("mount").args(["-t", "cgroup2", "none", GROUPS]).status();
        assert!(status.unwrap().success());
        write("cgroup.subtree_control", "+cpu +cpuset");
    }
}

fn write(file: &str, text: &str) {
    fs::write(Path::new(GROUPS).join(file), text).unwrap_or_else(|error| panic!("{file}: {error}"));
}

fn read(file: &str) -> String {
    fs::read_to_string(Path::new(GROUPS).join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Makes a threaded control group for a process that is in the root group.
fn threaded(name: &str) {
    fs::create_dir(Path::new(GROUPS).join(name)).unwrap();
    write(&format!("{name}/cgroup.type"), "threaded");
}

/// Returns a value from a group's `cpu.stat`.
fn cpu_stat(group: &str, key: &str) -> u64 {
    let stat = read(&format!("{group}/cpu.stat"));
    let words = stat.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')).unwrap();
    words.parse().unwrap()
}

fn group_error(options: &WorkerOptions) -> CgroupError {
    match options.check() {
        Err(WorkerOptionsError::Cgroup(error)) => error,
        other => panic!("{options:?}: {other:?}"),
    }
}

#[test]
fn memory_of_a_bound_worker_is_on_its_node() {
    let _alone = alone();
    if !in_guest() {
        return;
    }
    let nodes: Vec<u32> = (0..4).map(node_of).collect();
    println!("BB:NODES={nodes:?}");

    // A new thread may get the arena of an ended thread, with its pages. Beds that stay keep their arenas.
    let mut beds = Vec::new();
    while beds.len() < 5 {
        let bed = start((0..4).map(|cpu| on(&[cpu])).collect()).unwrap();
        let elsewhere = memory_elsewhere(&bed.seen, &nodes);
        if elsewhere.is_empty() {
            return;
        }
        println!("{elsewhere:?}");
        beds.push(bed);
    }
    panic!("workers have memory of other nodes, whatever arenas they get");
}

/// Workers with more than a tenth of their heap or stack outside their node.
fn memory_elsewhere(seen: &[Seen], nodes: &[u32]) -> Vec<String> {
    let workers = seen.iter().zip(nodes);
    let places =
        workers.flat_map(|(seen, node)| [(seen, node, seen.heap_addr), (seen, node, seen.stack_addr)]);
    let with_pages = places.map(|(seen, node, addr)| (seen, node, Seen::pages_by_node(addr)));
    let is_elsewhere = |pages: &[(u32, u64)], node: u32| {
        let all: u64 = pages.iter().map(|(_, pages)| pages).sum();
        let own: u64 = pages.iter().filter(|(of, _)| *of == node).map(|(_, pages)| pages).sum();
        assert!(all >= 64, "{pages:?}");
        own * 10 < all * 9
    };
    let elsewhere = with_pages.filter(|(_, node, pages)| is_elsewhere(pages, **node));
    elsewhere.map(|(seen, node, pages)| format!("{}: node {node}, pages {pages:?}", seen.name)).collect()
}

#[test]
fn worker_is_in_its_group_and_the_groups_limit_holds_for_it_alone() {
    let _alone = alone();
    if !in_guest() {
        return;
    }
    groups();
    threaded("slow");
    threaded("free");
    write("slow/cpu.max", "3000 100000");
    // Names a control group by an absolute and by a relative path. This process is in the root group.
    let bed = start(vec![in_group("/slow"), in_group("free")]).unwrap();
    assert_eq!((bed.seen[0].group.as_str(), bed.seen[1].group.as_str()), ("/slow", "/free"));
    assert_eq!(Seen::here().group, "/");
    for (group, seen) in ["slow", "free"].into_iter().zip(&bed.seen) {
        assert_eq!(read(&format!("{group}/cgroup.threads")), format!("{}\n", seen.thread_id));
    }

    let (front_end, mut slow) = ready(&bed.rig, feature::USUAL);
    let mut free = front_end.start_queue(1, 256, feature::USUAL);
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while cpu_stat("slow", "nr_throttled") < 5 {
                assert_eq!(slow.read(0, 4096).status, Some(0));
            }
            enough.store(true, Ordering::Relaxed);
        });
        while !enough.load(Ordering::Relaxed) {
            assert_eq!(free.read(8, 4096).status, Some(0));
        }
    });

    assert_eq!(cpu_stat("free", "nr_throttled"), 0);
}

/// The layout of docs/how-to/workers.md: the process in its own group, its workers in threaded groups below.
#[test]
fn groups_below_the_processs_own_are_named_without_a_slash() {
    let _alone = alone();
    if !in_guest() {
        return;
    }
    groups();
    fs::create_dir(Path::new(GROUPS).join("bareblk")).unwrap();
    threaded("bareblk/w0");
    threaded("bareblk/w1");
    write("bareblk/cgroup.subtree_control", "+cpu +cpuset");
    write("bareblk/w1/cpu.max", "50000 100000");
    write("bareblk/cgroup.procs", &std::process::id().to_string());

    let bed = start(vec![in_group("w0"), in_group("/sys/fs/cgroup/bareblk/w1")]);
    let own = Seen::here().group;
    write("cgroup.procs", &std::process::id().to_string());

    let groups: Vec<String> = bed.unwrap().seen.iter().map(|seen| seen.group.clone()).collect();
    assert_eq!((own.as_str(), groups), ("/bareblk", vec!["/bareblk/w0".into(), "/bareblk/w1".into()]));
}

#[test]
fn cpuset_of_the_group_binds_and_limits_what_can_be_bound_to() {
    let _alone = alone();
    if !in_guest() {
        return;
    }
    groups();
    threaded("two");
    write("two/cpuset.cpus", "1-2");

    let bed = start(vec![in_group("two"), WorkerOptions { cpus: vec![2], ..in_group("two") }]).unwrap();
    assert_eq!((bed.seen[0].cpus.as_str(), bed.seen[1].cpus.as_str()), ("1-2", "2"));

    let outside = WorkerOptions { cpus: vec![2, 3], ..in_group("two") }.check().unwrap_err().to_string();
    assert!(
        outside.starts_with("CPU 3 is outside the process's affinity mask: the process may run on 1-2"),
        "{outside}"
    );
}

#[test]
fn group_that_takes_no_thread_of_ours_is_refused_with_the_reason() {
    let _alone = alone();
    if !in_guest() {
        return;
    }
    groups();
    let folder = |name: &str| fs::create_dir(Path::new(GROUPS).join(name)).unwrap();
    folder("plain");
    threaded("parent");
    folder("parent/child");
    folder("domain");
    threaded("domain/thread");
    threaded("ice");
    write("ice/cgroup.freeze", "1");
    threaded("mine");

    assert!(matches!(group_error(&in_group("/absent")), CgroupError::Missing { .. }));
    assert!(matches!(group_error(&in_group("/proc")), CgroupError::NotVersion2 { .. }));
    let plain = group_error(&in_group("/plain"));
    assert!(matches!(&plain, CgroupError::NotThreaded { kind, .. } if kind == "domain"), "{plain}");
    let child = group_error(&in_group("parent/child"));
    assert!(matches!(&child, CgroupError::NotThreaded { kind, .. } if kind == "domain invalid"), "{child}");
    let elsewhere = group_error(&in_group("domain/thread"));
    assert!(matches!(&elsewhere, CgroupError::OtherDomain { .. }), "{elsewhere}");
    assert!(matches!(group_error(&in_group("ice")), CgroupError::Frozen { .. }));
    write("ice/cgroup.freeze", "0");
    in_group("ice").check().unwrap();

    use std::os::unix::fs::PermissionsExt;
    let threads = Path::new(GROUPS).join("mine/cgroup.threads");
    fs::set_permissions(&threads, fs::Permissions::from_mode(0o444)).unwrap();
    let denied = std::thread::spawn(|| {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::DAC_OVERRIDE);
        set_capabilities(None, sets).unwrap();
        group_error(&in_group("mine")).to_string()
    });
    let denied = denied.join().unwrap();
    assert!(denied.starts_with("no permission to join cgroup /sys/fs/cgroup/mine: "), "{denied}");
}

#[test]
fn cpu_that_was_switched_off_is_refused_until_it_is_back() {
    let _alone = alone();
    if !in_guest() {
        return;
    }
    let switch = |state: &str| fs::write("/sys/devices/system/cpu/cpu3/online", state).unwrap();
    switch("0");
    let error = on(&[1, 3]).check().unwrap_err().to_string();
    switch("1");
    assert_eq!(error, "CPU 3 is offline or does not exist: the online CPUs are 0-2");
    on(&[1, 3]).check().unwrap();
}
