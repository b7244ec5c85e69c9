//! A small result with all features, for tests.

use crate::experiment::{Axis, Layer, Map, Workload};
use crate::experiments;
use crate::machine::{Machine, StoragePlace};
use crate::result::{Collected, FORMAT, RunResult, cells};
use crate::stats::Summary;
use crate::verdict::judge;

/// A result with three rounds of the first workload of `aio`. One variant lacks a sample, and one is not available.
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

/// [`result`] with a second workload, and a map of two by two cells over both workloads. `none-posix-aio-1` has figures
/// in two cells: 1.01 at row 1 and column 20, and 2.5 at row 4 and column 0; `none-posix-aio-4` has none.
pub(crate) fn with_map() -> (RunResult, Map) {
    let mut result = result();
    let placed = |id: &str, down, across| Workload::new(id, id).at("per-core", down).at("pauses", across);
    let mut others = result.cells.clone();
    others.iter_mut().for_each(|cell| cell.workload = "second".into());
    let ratio = others.iter_mut().find_map(|cell| cell.ratio.as_mut()).expect("one has");
    ratio.summary = Summary { median: 2.5, low: 2.0, high: 3.0, coverage: 1.0 };
    result.cells.extend(others);
    result.experiment.workloads = vec![placed("disk-randwrite", 1.0, 20.0), placed("second", 4.0, 0.0)];
    let map = Map {
        id: "plane".into(),
        title: "Throughput <over> the plane".into(),
        across: Axis { key: "pauses".into(), title: "pauses outside".into() },
        down: Axis { key: "per-core".into(), title: "threads per core".into() },
        variants: vec!["none-posix-aio-1".into(), "none-posix-aio-4".into()],
        layers: vec![Layer {
            label: "held <briefly>".into(),
            workloads: vec!["disk-randwrite".into(), "second".into()],
        }],
    };
    result.experiment.maps = vec![map.clone()];
    (result, map)
}
