//! The demo's final table: guest next to host, and the server's cost per I/O.

use std::fmt::Write;
use std::time::Duration;

use xtask::guest::Accel;

use super::fio::Numbers;

/// One job in the guest and on the host.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) title: &'static str,
    pub(super) guest: Numbers,
    /// `None` if fio cannot reach the disk from the host.
    pub(super) host: Option<Numbers>,
    /// CPU time that the server used while the guest's job ran.
    pub(super) server_cpu: Duration,
}

impl Row {
    /// `None` if the guest made no requests.
    fn server_cpu_us_per_io(&self) -> Option<f64> {
        per_io(self.server_cpu.as_secs_f64() * 1e6, self.guest.ios)
    }

    /// The cost of the same load for fio on the host.
    fn host_cpu_us_per_io(&self) -> Option<f64> {
        self.host.and_then(|host| per_io(host.cpu_us, host.ios))
    }
}

#[allow(clippy::cast_precision_loss)] // I/O counts stay far below 2^53
fn per_io(cpu_us: f64, ios: u64) -> Option<f64> {
    (ios > 0).then(|| cpu_us / ios as f64)
}

/// `fio` says how fio reached the disk on each side.
pub(super) fn text(rows: &[Row], accel: Accel, kernel: &str, fio: &str) -> String {
    let mut text = String::from("\nVerified writes in the guest (4k-128k, depth 16, crc32c): no error\n\n");
    let head = ["", "where", "IOPS", "MiB/s", "mean latency", "CPU per I/O"];
    let _ = writeln!(text, "{}", line(head));
    for row in rows {
        let cell = |whose, us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{whose} {us:.1} µs"));
        let (guest, host) = (row.server_cpu_us_per_io(), row.host_cpu_us_per_io());
        let _ = writeln!(text, "{}", side(row.title, "guest", &row.guest, &cell("server", guest)));
        if let Some(numbers) = &row.host {
            let _ = writeln!(text, "{}", side("", "host", numbers, &cell("fio", host)));
        }
    }
    let _ = writeln!(text, "\nguest: {kernel}\n{fio}");
    text.push_str(caveat(accel));
    text
}

fn side(title: &str, place: &str, numbers: &Numbers, cpu: &str) -> String {
    let Numbers { iops, mib_per_s, latency_us, .. } = numbers;
    let cells = [format!("{iops:.0}"), format!("{mib_per_s:.1}"), format!("{latency_us:.0} µs")];
    line([title, place, &cells[0], &cells[1], &cells[2], cpu])
}

fn line(cells: [&str; 6]) -> String {
    let [title, place, iops, mib, latency, cpu] = cells;
    format!("{title:<26} {place:<6} {iops:>8} {mib:>8} {latency:>13} {cpu:>19}").trim_end().to_owned()
}

fn caveat(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "The guest ran on the processor (KVM).\n",
        Accel::Tcg => {
            "The guest ran under emulation (TCG: /dev/kvm does not work here), which limits its IOPS. Requests\n\
             that arrive this slowly arrive one at a time: the server spends most of its CPU time on wake-ups\n\
             and on polling for the next request.\n"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(guest_ios: u64) -> Row {
        let numbers =
            Numbers { ios: guest_ios, iops: 1234.4, mib_per_s: 4.82, latency_us: 810.2, cpu_us: 2e4 };
        Row {
            title: "4k random read",
            guest: numbers,
            host: Some(numbers),
            server_cpu: Duration::from_millis(30),
        }
    }

    #[test]
    fn table_has_two_lines_per_job_and_cpu_per_io() {
        let text = text(&[row(10_000)], Accel::Tcg, "linux", "fio: libaio");
        let guest = text.lines().find(|line| line.contains("guest  ")).unwrap();
        assert!(guest.contains("1234") && guest.ends_with("3.0 µs"), "{guest}");
        assert!(
            text.lines().any(|line| line.trim_start().starts_with("host")
                && line.contains("810 µs")
                && line.ends_with("µs")),
            "{text}"
        );
    }

    #[test]
    fn job_that_the_host_cannot_run_has_only_the_guests_line() {
        let text = text(&[Row { host: None, ..row(10_000) }], Accel::Kvm, "linux", "no engine");
        assert!(text.contains("guest  ") && !text.contains("host  ") && text.contains("no engine"), "{text}");
    }

    #[test]
    fn emulation_is_mentioned_only_where_it_was_used() {
        assert!(text(&[], Accel::Tcg, "linux", "").contains("emulation"));
        assert!(!text(&[], Accel::Kvm, "linux", "").contains("emulation"));
    }

    #[test]
    fn guest_without_io_has_no_cost_per_io() {
        assert_eq!(row(0).server_cpu_us_per_io(), None);
    }
}
