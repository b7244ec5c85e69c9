//! `bareblk ctl limit`: the limits of disks and groups, with their use between two readings.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use blk_server::LimitKind;
use serde_json::Value;

use super::rates;
use super::tables::{plain, table};
use crate::args::limit_args;
use crate::args::usage::Wrong;
use crate::control::answers::throttling::{LimitAnswer, Rate};
use crate::control::protocol::verbs::Limit;

/// The time between the two readings.
pub const PAUSE: Duration = Duration::from_millis(500);
const NONE: &str = "-";
const HEADINGS: [&str; 9] =
    ["DISK", "GROUP", "LIMIT", "RATE/s", "MAX/s", "CREDIT", "OF", "USED/s", "WAITED s"];

/// The request that the words describe: a disk unless there is a group, then settings.
pub fn request(words: Vec<String>, group: Option<String>) -> Result<Limit> {
    let mut words = words.into_iter().peekable();
    let disk = words.next_if(|word| !word.contains('='));
    if let (Some(disk), Some(group)) = (&disk, &group) {
        bail!(Wrong(format!(
            "disk {disk} and --group {group} cannot be combined: give either a disk or a group"
        )));
    }
    let mut request = Limit { disk, group, ..Limit::default() };
    for word in words {
        let (key, value) = limit_args::change(&word).map_err(|error| anyhow!(Wrong(format!("{error:#}"))))?;
        if request.set.contains_key(&key) {
            bail!(Wrong(format!("{key}= appears twice: give it once")));
        }
        request.set.insert(key, value);
    }
    if request.disk.is_none() && request.group.is_none() && !request.set.is_empty() {
        bail!(Wrong("no disk is given: give the disk whose limits to change, or --group NAME".into()));
    }
    Ok(request)
}

/// One row for each limit, with its use between two readings.
pub fn shown(before: &LimitAnswer, now: &LimitAnswer) -> String {
    let seconds = rates::float(now.at_ns.saturating_sub(before.at_ns)) / 1e9;
    let row = |names: [String; 2], rate: &Rate, old: &[Rate], waited: String| {
        let old = old.iter().find(|old| old.limit == rate.limit);
        let used = rate.used.saturating_sub(old.map_or(rate.used, |old| old.used));
        // A newer server may have limits of which this client does not know the unit.
        let is_bytes = LimitKind::of_key(&rate.limit).is_some_and(LimitKind::is_bytes);
        let size = |units: u64| if is_bytes { bytes(units) } else { units.to_string() };
        let figures = [
            size(rate.rate),
            rate.max.map_or_else(|| NONE.into(), size),
            size(rate.credit),
            size(rate.capacity),
            format!("{:.0}", rates::float(used) / seconds.max(1e-9)),
            waited,
        ];
        names.into_iter().chain([rate.limit.clone()]).chain(figures).collect::<Vec<_>>()
    };
    let mut rows = Vec::new();
    for disk in &now.disks {
        let old = before.disks.iter().find(|old| old.disk == disk.disk);
        let old = old.map(|old| old.throttling.limits.as_slice()).unwrap_or_default();
        let throttling = &disk.throttling;
        let waited = format!("{:.1}", rates::float(throttling.throttled_ns) / 1e9);
        let group = plain(throttling.group.as_deref().unwrap_or(NONE));
        for rate in &throttling.limits {
            rows.push(row([plain(&disk.disk), group.clone()], rate, old, waited.clone()));
        }
        if throttling.limits.is_empty() && throttling.group.is_some() {
            let names = [plain(&disk.disk), group];
            rows.push(names.into_iter().chain(vec![NONE.to_owned(); 6]).chain([waited]).collect());
        }
    }
    for group in &now.groups {
        let old = before.groups.iter().find(|old| old.group == group.group);
        let old = old.map(|old| old.limits.as_slice()).unwrap_or_default();
        for rate in &group.limits {
            rows.push(row([NONE.into(), plain(&group.group)], rate, old, NONE.into()));
        }
    }
    if rows.is_empty() {
        return "no limits\n".into();
    }
    table(&HEADINGS, 3, rows.into_iter())
}

/// The text printed after a change.
pub fn changed(ok: &Value) -> String {
    match ok["until_reload"].as_bool() {
        Some(true) => "changed; a reload brings back the limits in the configuration file\n".into(),
        _ => "changed\n".into(),
    }
}

/// A size with a unit (powers of 1024), rounded down: for people.
fn bytes(bytes: u64) -> String {
    let units = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let unit = units.into_iter().find(|(shift, _)| bytes >> shift > 0);
    unit.map_or_else(
        || bytes.to_string(),
        |(shift, name)| {
            let tenths = (u128::from(bytes) * 10) >> shift;
            if tenths % 10 == 0 {
                format!("{}{name}", tenths / 10)
            } else {
                format!("{}.{}{name}", tenths / 10, tenths % 10)
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::answers::throttling::{DiskThrottling, Group, LimitedDisk};

    fn words(line: &str) -> Vec<String> {
        line.split(' ').filter(|word| !word.is_empty()).map(str::to_owned).collect()
    }

    #[test]
    fn words_are_a_disk_and_its_limits_or_limits_of_a_group() {
        let disk = request(words("data iops=5000 bps=off"), None).unwrap();
        assert_eq!((disk.disk.as_deref(), disk.set["iops"].as_u64()), (Some("data"), Some(5000)));
        assert!(disk.set["bps"].is_null());
        let group = request(words("iops=off"), Some("acme".into())).unwrap();
        assert_eq!((group.disk, group.group.as_deref(), group.set.len()), (None, Some("acme"), 1));
        assert_eq!(request(Vec::new(), None).unwrap(), Limit::default());
    }

    #[test]
    fn request_without_a_target_or_with_two_is_wrong_usage() {
        for (line, group) in [("iops=5", None), ("data", Some("acme")), ("data iops=5 iops=6", None)] {
            assert!(request(words(line), group.map(str::to_owned)).unwrap_err().is::<Wrong>(), "{line}");
        }
    }

    #[test]
    fn limits_are_shown_with_their_use_per_second() {
        let answer = |at_ns, used| {
            let rate = Rate {
                limit: "bps".into(),
                rate: 200 << 20,
                credit: 1536,
                capacity: 20 << 20,
                used,
                ..Rate::default()
            };
            let throttling = DiskThrottling {
                limits: vec![rate.clone()],
                throttled_ns: 3_400_000_000,
                ..DiskThrottling::default()
            };
            let disks = vec![LimitedDisk { disk: "root".into(), throttling }];
            let groups = vec![Group { group: "acme".into(), limits: vec![rate], ..Group::default() }];
            LimitAnswer { at_ns, disks, groups }
        };
        let text = shown(&answer(0, 1000), &answer(500_000_000, 2000));
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["root", "-", "bps", "200M", "-", "1.5K", "20M", "2000", "3.4"]);
        assert_eq!(lines[2], ["-", "acme", "bps", "200M", "-", "1.5K", "20M", "2000", "-"]);
    }

    #[test]
    fn server_without_limits_says_so() {
        assert_eq!(shown(&LimitAnswer::default(), &LimitAnswer::default()), "no limits\n");
    }
}
