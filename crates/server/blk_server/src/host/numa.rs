//! Finds the NUMA node of CPUs in `/sys/devices/system/node`.
//!
//! - No memory is bound to a node. The kernel allocates memory on the node of the CPU that touches it first, and a
//!   bound worker touches its own memory first.
//! - A host without these files (no NUMA in the kernel, or no sysfs) has no nodes; this is not an error.

use std::path::Path;

use crate::host::cpu_list::parse_kernel_list;

/// Linux's list of nodes.
const NODES: &str = "/sys/devices/system/node";

/// The node of all `cpus`. `None` if the CPUs are on several nodes or an unknown node, or if there are no CPUs.
pub(crate) fn node_of(cpus: &[u32]) -> Option<u32> {
    node_in(Path::new(NODES), cpus)
}

fn node_in(nodes: &Path, cpus: &[u32]) -> Option<u32> {
    if cpus.is_empty() {
        return None;
    }
    let list = |path: &str| parse_kernel_list(&std::fs::read_to_string(nodes.join(path)).ok()?);
    list("online")?.into_iter().find(|node| {
        let of_node = list(&format!("node{node}/cpulist")).unwrap_or_default();
        cpus.iter().all(|cpu| of_node.contains(cpu))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a folder with these files, given as `(path, content)`.
    fn files(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        folder
    }

    #[test]
    fn cpus_of_one_node_have_it_and_cpus_of_two_have_none() {
        let host = files(&[
            ("online", "0-1,3\n"),
            ("node0/cpulist", "0-3,8-11\n"),
            ("node1/cpulist", "\n"),
            ("node3/cpulist", "4-7\n"),
        ]);
        let node = |cpus: &[u32]| node_in(host.path(), cpus);
        assert_eq!((node(&[1, 9]), node(&[4, 5, 6, 7])), (Some(0), Some(3)));
        assert_eq!((node(&[3, 4]), node(&[64]), node(&[])), (None, None, None));
    }

    #[test]
    fn files_that_are_absent_or_nonsense_are_no_node() {
        let without = files(&[]);
        let nonsense = files(&[("online", "all of them\n"), ("node0/cpulist", "0-3\n")]);
        let half = files(&[("online", "0-1\n"), ("node1/cpulist", "2-\u{0}\n")]);
        for host in [without, nonsense, half] {
            assert_eq!(node_in(host.path(), &[2]), None);
        }
    }
}
