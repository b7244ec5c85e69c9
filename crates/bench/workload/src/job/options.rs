//! fio's options by name: one table for job files and the command line.
//!
//! - An unknown option is an error that lists the known ones; an invalid value is an error that describes valid ones.
//!   Nothing is skipped: a job must never mean something different from what it means in fio.
//! - `norandommap` and `thread` are accepted without effect, because this program always works that way. `ioscheduler`
//!   is reported and never set, because the host's administrator chooses it.
//!
//! Facts: fio 3.33, HOWTO, "Job file parameters".

use io_engine::EngineKind;

use super::{Job, MAX_BLOCK_BYTES, MAX_DEPTH, MAX_JOBS, Mix, Order, Pattern, units};

/// An option that cannot be set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// The option is not in the table.
    #[error("option '{option}' is unknown; known options: {}", known().join(", "))]
    Unknown {
        /** The unknown option. */
        option: String,
    },
    /// An invalid value.
    #[error("{option}={value} is invalid: give {wanted}")]
    Value {
        /** The option's name. */
        option: String,
        /** The invalid value. */
        value: String,
        /** The valid values. */
        wanted: String,
    },
    /// An option without its value.
    #[error("option '{option}' needs a value: give {wanted}")]
    NoValue {
        /** The option's name. */
        option: String,
        /** The valid values. */
        wanted: String,
    },
}

/// Sets an option of a job. `Err` describes the valid values.
type Set = fn(&mut Job, &str) -> Result<(), String>;

struct Known {
    names: &'static [&'static str],
    /// The option may be given without a value; the value is then "1".
    flag: bool,
    set: Set,
}

const fn value(names: &'static [&'static str], set: Set) -> Known {
    Known { names, flag: false, set }
}

const fn flag(names: &'static [&'static str], set: Set) -> Known {
    Known { names, flag: true, set }
}

/// Reports use the first of an option's names.
const TABLE: [Known; 25] = [
    value(&["name"], |job, text| {
        job.name = text.to_owned();
        Ok(())
    }),
    value(&["filename"], |job, text| {
        job.filename = Some(text.to_owned());
        Ok(())
    }),
    value(&["rw", "readwrite"], |job, text| {
        job.pattern = pattern(text).ok_or("read, write, rw, randread, randwrite or randrw")?;
        Ok(())
    }),
    value(&["rwmixread"], |job, text| to(&mut job.read_percent, number(text, 0, 100))),
    value(&["rwmixwrite"], |job, text| {
        to(&mut job.read_percent, number(text, 0, 100).map(|write| 100 - write))
    }),
    value(&["bs", "blocksize"], |job, text| {
        let size = size(text, 512, MAX_BLOCK_BYTES)?;
        to(&mut job.block_bytes, u32::try_from(size).map_err(|_| String::new()))
    }),
    value(&["iodepth"], |job, text| to(&mut job.depth, number(text, 1, MAX_DEPTH))),
    value(&["iodepth_batch", "iodepth_batch_submit"], |job, text| {
        job.batch = Some(number(text, 1, MAX_DEPTH)?);
        Ok(())
    }),
    value(&["numjobs", "jobs"], |job, text| to(&mut job.jobs, number(text, 1, MAX_JOBS))),
    value(&["offset"], |job, text| to(&mut job.offset_bytes, size(text, 0, u64::MAX))),
    value(&["size"], |job, text| {
        job.size_bytes = Some(size(text, 1, u64::MAX)?);
        Ok(())
    }),
    value(&["loops"], |job, text| to(&mut job.loops, number(text, 1, u32::MAX))),
    value(&["runtime", "timeout"], |job, text| {
        let wanted = "a time such as 30, 500ms or 2m, at least 1ms";
        job.runtime = Some(units::time(text).filter(|time| time.as_millis() > 0).ok_or(wanted)?);
        Ok(())
    }),
    flag(&["time_based"], |job, text| to(&mut job.time_based, switch(text))),
    value(&["verify"], |job, text| match text {
        "crc32c" => to(&mut job.verify, Ok(true)),
        "0" | "none" => to(&mut job.verify, Ok(false)),
        _ => Err("crc32c, the only supported method, or 0".to_owned()),
    }),
    value(&["fsync"], |job, text| to(&mut job.fsync, number(text, 0, u32::MAX))),
    value(&["rate"], |job, text| to(&mut job.rate.bytes, size(text, 1, u64::MAX))),
    value(&["rate_iops"], |job, text| to(&mut job.rate.iops, number(text, 1, u32::MAX).map(u64::from))),
    value(&["randseed"], |job, text| {
        job.seed = text.parse().map_err(|_| "a whole number below 2^64")?;
        Ok(())
    }),
    flag(&["group_reporting"], |job, text| to(&mut job.group_reporting, switch(text))),
    flag(&["direct"], |job, text| to(&mut job.direct, switch(text))),
    value(&["ioengine"], |job, text| {
        job.engine = engine(text).ok_or("io_uring, libaio (or aio), psync (or sync), or posixaio")?;
        Ok(())
    }),
    value(&["ioscheduler"], |job, text| {
        job.io_scheduler = Some(text.to_owned());
        Ok(())
    }),
    flag(&["stonewall", "wait_for_previous"], |job, text| to(&mut job.stonewall, switch(text))),
    flag(&["norandommap", "thread"], |_, text| switch(text).map(drop)),
];

/// Every name, for error messages.
#[must_use]
pub fn known() -> Vec<&'static str> {
    TABLE.iter().flat_map(|known| known.names).copied().collect()
}

impl Job {
    /// Sets an option.
    ///
    /// # Errors
    /// [`OptionError`]; the job is then unchanged.
    pub fn set(&mut self, option: &str, value: Option<&str>) -> Result<(), OptionError> {
        let known = TABLE.iter().find(|known| known.names.contains(&option));
        let known = known.ok_or_else(|| OptionError::Unknown { option: option.to_owned() })?;
        let text = match value {
            Some(text) => text.trim(),
            None if known.flag => "1",
            None => {
                let wanted =
                    (known.set)(&mut self.clone(), "").err().unwrap_or_else(|| "some text".to_owned());
                return Err(OptionError::NoValue { option: option.to_owned(), wanted });
            }
        };
        (known.set)(self, text).map_err(|wanted| {
            let (option, value) = (option.to_owned(), text.to_owned());
            OptionError::Value { option, value, wanted }
        })?;
        let name = known.names.iter().find(|name| **name == option).copied().unwrap_or(option);
        self.options.retain(|(earlier, _)| earlier != name);
        self.options.push((name.to_owned(), text.to_owned()));
        Ok(())
    }
}

fn to<T>(place: &mut T, value: Result<T, String>) -> Result<(), String> {
    *place = value?;
    Ok(())
}

fn number(text: &str, least: u32, most: u32) -> Result<u32, String> {
    let wanted = || format!("a whole number from {least} to {most}");
    text.parse().ok().filter(|number| (least..=most).contains(number)).ok_or_else(wanted)
}

fn size(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let wanted = || match most {
        u64::MAX => "bytes, such as 512, 4k, 25g".to_owned(),
        most => format!("bytes, such as 4k, from {} to {}", units::short(least), units::short(most)),
    };
    units::bytes(text).filter(|bytes| (least..=most).contains(bytes)).ok_or_else(wanted)
}

fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err("0 or 1".to_owned()),
    }
}

fn pattern(text: &str) -> Option<Pattern> {
    let of = |order, mix| Some(Pattern { order, mix });
    match text {
        "read" => of(Order::Sequential, Mix::Read),
        "write" => of(Order::Sequential, Mix::Write),
        "rw" | "readwrite" => of(Order::Sequential, Mix::Both),
        "randread" => of(Order::Random, Mix::Read),
        "randwrite" => of(Order::Random, Mix::Write),
        "randrw" => of(Order::Random, Mix::Both),
        _ => None,
    }
}

/// Parses fio's name of an engine.
fn engine(text: &str) -> Option<EngineKind> {
    match text {
        "io_uring" => Some(EngineKind::IoUring),
        "libaio" | "aio" | "linuxaio" => Some(EngineKind::LinuxAio),
        "psync" | "sync" => Some(EngineKind::Sync),
        "posixaio" => Some(EngineKind::PosixAio),
        _ => None,
    }
}

/// fio's name for one of our engines.
#[must_use]
pub fn engine_word(engine: EngineKind) -> &'static str {
    match engine {
        EngineKind::LinuxAio => "libaio",
        EngineKind::Sync => "psync",
        EngineKind::PosixAio => "posixaio",
        other => other.name(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(options: &[(&str, Option<&str>)]) -> Result<Job, OptionError> {
        let mut job = Job::default();
        options.iter().try_for_each(|(option, value)| job.set(option, *value))?;
        Ok(job)
    }

    fn refusal(option: &str, value: Option<&str>) -> String {
        job(&[(option, value)]).unwrap_err().to_string()
    }

    #[test]
    fn options_set_what_they_name() {
        let options = [
            ("rw", Some("randrw")),
            ("rwmixwrite", Some("30")),
            ("bs", Some("8k")),
            ("iodepth", Some("64")),
            ("numjobs", Some("256")),
            ("size", Some("4MB")),
            ("loops", Some("3")),
            ("runtime", Some("120")),
            ("time_based", None),
            ("ioengine", Some("aio")),
            ("direct", Some("0")),
        ];
        let job = job(&options).unwrap();
        assert_eq!((job.pattern.word(), job.read_percent, job.block_bytes), ("randrw", 70, 8192));
        assert_eq!((job.depth, job.jobs, job.size_bytes, job.loops), (64, 256, Some(4 << 20), 3));
        assert_eq!(job.runtime.map(|time| time.as_secs()), Some(120));
        assert!(job.time_based && !job.direct && job.engine == EngineKind::LinuxAio);
    }

    #[test]
    fn option_that_is_not_known_is_named_with_those_that_are() {
        let line = refusal("zonesize", Some("1m"));
        assert!(
            line.starts_with("option 'zonesize' is unknown; known options: name, filename, rw,"),
            "{line}"
        );
    }

    #[test]
    fn values_that_are_not_understood_say_what_would_be() {
        assert_eq!(refusal("iodepth", Some("0")), "iodepth=0 is invalid: give a whole number from 1 to 4096");
        assert_eq!(refusal("bs", Some("4x")), "bs=4x is invalid: give bytes, such as 4k, from 512 to 64m");
        assert_eq!(
            refusal("verify", Some("md5")),
            "verify=md5 is invalid: give crc32c, the only supported method, or 0"
        );
        assert!(refusal("rw", Some("trim")).starts_with("rw=trim is invalid: give read, write"));
        assert_eq!(refusal("direct", Some("yes")), "direct=yes is invalid: give 0 or 1");
    }

    #[test]
    fn option_without_its_value_says_which_it_wants() {
        assert_eq!(
            refusal("rwmixread", None),
            "option 'rwmixread' needs a value: give a whole number from 0 to 100"
        );
    }

    #[test]
    fn later_value_takes_the_place_of_the_earlier() {
        let job = job(&[("bs", Some("4k")), ("bs", Some("8k"))]).unwrap();
        assert_eq!((job.block_bytes, job.options.len()), (8192, 1));
    }
}
