//! `bareblk vmm-args`: prints the options that a virtual machine monitor needs, ready to paste.
//!
//! - Guest memory must be shared: the server reads and writes it in place.
//! - The queue size is explicit: the monitors' default of 128 holds few large requests.
//! - QEMU's device is modern only: firmware may drive a transitional one as legacy, which no vhost-user server supports
//!   (docs/how-to/clients.md).
//!
//! Sources: QEMU 7.2 and 10.0 (`-device vhost-user-blk-pci,help`; `reconnect` is in seconds, deprecated since 9.2 in
//! favour of `reconnect-ms`); libvirt's domain format (vhostuser disks since 7.1, `queue_size` since 7.8);
//! cloud-hypervisor's `docs/vhost-user-blk-testing.md`.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::cli::{Vmm, VmmArgs};

/// The text to print, ending with a line break.
pub fn text(args: &VmmArgs) -> Result<String> {
    ensure!(args.memory > 0 && args.memory.is_multiple_of(1 << 20), "--memory: give whole MiB, such as 512M");
    // Makes the path absolute, because the monitor may run in another folder.
    let socket = std::path::absolute(&args.socket).context("--socket")?;
    let socket = socket.to_str().context("--socket: the path is not UTF-8, choose another one")?;
    match args.vmm {
        Vmm::Qemu => Ok(qemu(args, socket)),
        Vmm::Libvirt => Ok(libvirt(args, socket)),
        Vmm::CloudHypervisor => cloud_hypervisor(args, socket),
    }
}

fn qemu(args: &VmmArgs, socket: &str) -> String {
    let (memory, size, id) = (memory(args.memory), args.queue_size, device_id(socket));
    let queues = args.queues.map(|queues| format!(",num-queues={queues}")).unwrap_or_default();
    let chardev = format!("socket,id={id},path={},reconnect=1", socket.replace(',', ",,"));
    let chardev = shell_word(&chardev);
    format!(
        "\
# Add to QEMU's command line. The memory is the guest's (-m), once for all disks; bareblk shares it.
# QEMU makes one queue per vCPU unless num-queues says otherwise.
# Without disable-legacy=on, firmware such as OVMF uses the disk as a legacy device, and does not boot.
# QEMU 9.2 or newer prefers reconnect-ms=1000 to reconnect=1, which is deprecated.
-m {memory} \\
-object memory-backend-memfd,id=bareblk-mem,size={memory},share=on \\
-machine memory-backend=bareblk-mem \\
-chardev {chardev} \\
-device vhost-user-blk-pci,chardev={id},disable-legacy=on,queue-size={size}{queues}
"
    )
}

fn libvirt(args: &VmmArgs, socket: &str) -> String {
    let (memory_mib, size, socket) = (args.memory >> 20, args.queue_size, xml_attribute(socket));
    let queues = args.queues.map(|queues| format!(" queues='{queues}'")).unwrap_or_default();
    format!(
        "\
<!-- Below domain. QEMU's user must be allowed to connect to the socket: give bareblk serve its owner,
     or its group and mode 660. -->
<memory unit='MiB'>{memory_mib}</memory>
<memoryBacking>
  <source type='memfd'/>
  <access mode='shared'/>
</memoryBacking>

<!-- Below devices. -->
<disk type='vhostuser' device='disk'>
  <driver name='qemu' type='raw'{queues} queue_size='{size}'/>
  <source type='unix' path='{socket}'>
    <reconnect enabled='yes' timeout='1'/>
  </source>
  <target dev='vda' bus='virtio'/>
</disk>
"
    )
}

fn cloud_hypervisor(args: &VmmArgs, socket: &str) -> Result<String> {
    ensure!(
        !socket.contains([',', '"', '[', ']']),
        "--socket: cloud-hypervisor takes no path with a comma, quote or bracket: choose another one"
    );
    let (memory, queues, size) = (memory(args.memory), args.queues.unwrap_or(1), args.queue_size);
    let disk = format!("vhost_user=true,socket={socket},num_queues={queues},queue_size={size}");
    let disk = shell_word(&disk);
    Ok(format!(
        "\
# Add to cloud-hypervisor's command line. num_queues: as many as the guest has vCPUs, never more.
--memory size={memory},shared=on \\
--disk {disk}
"
    ))
}

/// Formats a size in the largest unit that all monitors know.
fn memory(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 30) { format!("{}G", bytes >> 30) } else { format!("{}M", bytes >> 20) }
}

/// An identifier for QEMU, from the socket's name, so that it differs from disk to disk.
fn device_id(socket: &str) -> String {
    let stem = Path::new(socket).file_stem().unwrap_or_default().to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    format!("bareblk-{}", stem.chars().map(plain).collect::<String>())
}

/// Returns the word, quoted if the shell would split it.
fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@%".contains(c);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

fn xml_attribute(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_words_survive_spaces_and_quotes() {
        assert_eq!(shell_word("socket,path=/run/a.sock"), "socket,path=/run/a.sock");
        assert_eq!(shell_word("/a b'c"), r"'/a b'\''c'");
    }

    #[test]
    fn memory_is_in_gibibytes_where_it_is_whole_ones() {
        assert_eq!(memory(4 << 30), "4G");
        assert_eq!(memory(1536 << 20), "1536M");
    }

    #[test]
    fn two_sockets_have_two_identifiers() {
        assert_eq!(device_id("/run/vm 1.sock"), "bareblk-vm_1");
        assert_ne!(device_id("/run/a.sock"), device_id("/run/b.sock"));
    }

    #[test]
    fn commas_are_doubled_for_qemu_and_refused_for_cloud_hypervisor() {
        let args = |vmm| VmmArgs {
            socket: "/run/a,b.sock".into(),
            vmm,
            queues: None,
            queue_size: 1024,
            memory: 1 << 30,
        };
        assert!(text(&args(Vmm::Qemu)).unwrap().contains("path=/run/a,,b.sock,reconnect=1"));
        assert!(text(&args(Vmm::CloudHypervisor)).is_err());
    }

    #[test]
    fn path_is_escaped_in_xml() {
        assert_eq!(xml_attribute("/a&b<c'd"), "/a&amp;b&lt;c&apos;d");
    }
}
