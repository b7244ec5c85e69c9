//! The experiments, each in its own file.
//!
//! See also: the common code (`experiment.rs`, `runner.rs`).

mod aio;

mod kick;

mod qspinlock;

mod vhost;

mod locality;

mod hostile;

mod disks;

mod limits;

mod remote;

mod qcow2;

use crate::error::LabError;
use crate::experiment::Experiment;

/// Every experiment, in the order of `bareblk lab list`.
#[must_use]
pub fn all() -> Vec<Experiment> {
    let mut all = vec![aio::experiment(), kick::experiment()];
    all.extend(qspinlock::parts());
    all.extend(vhost::parts());
    all.push(locality::experiment());
    all.push(hostile::experiment());
    all.push(disks::experiment());
    all.push(limits::experiment());
    all.extend(remote::parts());
    all.push(qcow2::experiment());
    all
}

/// Finds an experiment by name, or all parts of one: `qspinlock` means every `qspinlock-…`, `vhost` every
/// `vhost-…`.
///
/// # Errors
/// [`LabError::UnknownExperiment`], with all names.
pub fn find_all(name: &str) -> Result<Vec<Experiment>, LabError> {
    let prefix = format!("{name}-");
    let parts = all().into_iter().filter(|experiment| experiment.declaration.name.starts_with(&prefix));
    let parts: Vec<_> = parts.collect();
    if parts.is_empty() { find(name).map(|found| vec![found]) } else { Ok(parts) }
}

/// Finds one experiment by name.
///
/// # Errors
/// [`LabError::UnknownExperiment`], with all names.
pub fn find(name: &str) -> Result<Experiment, LabError> {
    let mut all = all();
    let known: Vec<_> = all.iter().map(|experiment| experiment.declaration.name.clone()).collect();
    let place = known.iter().position(|known| known == name);
    let unknown = || LabError::UnknownExperiment { name: name.to_owned(), known: known.join(", ") };
    place.map(|place| all.swap_remove(place)).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_name_is_refused_with_the_known_ones() {
        let line = find("nonsense").unwrap_err().to_string();
        let parts = "qspinlock-alone, qspinlock-overcommit, qspinlock-plane, qspinlock-wakes, qspinlock-timed, \
                     qspinlock-aim7";
        let vhost = "vhost-ssd, vhost-ram, vhost-depth1, vhost-disturbed, vhost-idle";
        let remote = "remote-nbd, remote-memstore, remote-bluestore, remote-disks, remote-neighbour";
        let expected = format!(
            "experiment 'nonsense' is unknown: give one of aio, kick, {parts}, {vhost}, locality, hostile, disks, \
             limits, {remote}, qcow2"
        );
        assert_eq!(line, expected);
    }

    #[test]
    fn declarations_refer_to_what_they_declare() {
        for declaration in all().into_iter().map(|experiment| experiment.declaration) {
            let variants: Vec<_> = declaration.variants.iter().map(|variant| &variant.id).collect();
            let workloads: Vec<_> = declaration.workloads.iter().map(|workload| &workload.id).collect();
            let columns: Vec<_> = declaration.columns.iter().map(|column| &column.id).collect();
            assert!(variants.contains(&&declaration.baseline));
            assert!(columns.contains(&&declaration.compared));
            assert!(declaration.plots.iter().flat_map(|plot| &plot.column).all(|id| columns.contains(&id)));
            let curves = &declaration.curves;
            assert!(curves.iter().flat_map(|curves| &curves.panels).all(|id| variants.contains(&id)));
            let courses = &declaration.courses;
            assert!(courses.iter().flat_map(|courses| &courses.variants).all(|id| variants.contains(&id)));
            assert!(courses.iter().all(|courses| columns.contains(&&courses.column)));
            let maps = &declaration.maps;
            assert!(maps.iter().flat_map(|map| &map.variants).all(|id| variants.contains(&id)));
            let layers = maps.iter().flat_map(|map| &map.layers);
            assert!(layers.flat_map(|layer| &layer.workloads).all(|id| workloads.contains(&id)));
            let parts = declaration.stacks.iter().flat_map(|stack| &stack.columns);
            assert!(parts.into_iter().all(|id| columns.contains(&id)));
            let against = declaration.variants.iter().filter_map(|variant| variant.against.as_ref());
            assert!(against.into_iter().all(|id| variants.contains(&id)));
            let targets = &declaration.targets;
            assert!(targets.iter().flat_map(|target| &target.variants).all(|id| variants.contains(&id)));
            assert!(targets.iter().flat_map(|target| &target.workloads).all(|id| workloads.contains(&id)));
            let published = &declaration.published;
            assert!(published.columns.iter().all(|column| workloads.contains(&&column.workload)));
            assert!(published.columns.iter().all(|column| columns.contains(&&column.column)));
            assert!(published.rows.iter().all(|row| variants.contains(&&row.variant)));
            let widths = published.rows.iter().map(|row| row.figures.len());
            assert!(widths.into_iter().all(|width| width == 0 || width == published.columns.len()));
        }
    }
}
