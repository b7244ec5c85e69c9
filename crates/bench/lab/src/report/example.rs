//! A small result with all features, for tests.

use crate::experiment::Workload;
use crate::experiments;
use crate::machine::{Machine, StoragePlace};
use crate::result::{Collected, FORMAT, RunResult, cells};
use crate::verdict::judge;

/// Three rounds of the first workload of `aio`; one variant lacks a sample and one is missing.
pub(crate) fn result() -> RunResult {
    let mut declaration = experiments::find("aio").expect("there").declaration;
    declaration.workloads = vec![Workload::new("disk-randwrite", "random <writes> & more")];
    let kept = ["bare", "none-posix-aio-1", "none-posix-aio-4"];
    declaration.variants.retain(|variant| kept.contains(&variant.id.as_str()));
    let reading = |mb: f64| Some(vec![Some(mb), Some(mb / 0.7), Some(3.5), None, Some(0.9), Some(2.25)]);
    let measured = |samples: [Option<f64>; 3]| {
        let readings = samples.map(|sample| sample.and_then(reading)).to_vec();
        Some(Collected { readings, unavailable: None })
    };
    let why = "posix-aio: <no> such engine".to_owned();
    let collected = vec![vec![
        measured([Some(100.0), Some(102.0), Some(98.0)]),
        measured([Some(90.0), None, Some(110.0)]),
        Some(Collected { readings: vec![None; 3], unavailable: Some(why) }),
    ]];
    let cells = cells(&declaration, &collected);
    RunResult {
        format: FORMAT,
        verdicts: judge(&declaration, &cells),
        effort: declaration.quick,
        experiment: declaration,
        program: "bareblk 0.1.0".into(),
        command: "bareblk lab run aio --out 'a & b'".into(),
        date: "2026-11-21T00:00:00Z".into(),
        quick: true,
        seed: 1,
        machine: Machine {
            cpu: "A processor".into(),
            cores: 2,
            memory_mib: 1024,
            kernel: "Linux 6.1".into(),
            storages: vec![StoragePlace {
                label: "disk".into(),
                path: "/d".into(),
                file_system: "ext4 on /dev/vda".into(),
            }],
        },
        notes: vec!["Bare metal is fio-3.33 with libaio.".into()],
        cells,
    }
}
