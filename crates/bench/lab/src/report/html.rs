//! The report: one self-contained HTML page over all results in a folder.
//!
//! `results → section per experiment: verdicts, published figures, tables, plots, differences, methods, machine`
//!
//! - All text from a result file is escaped, because people exchange these files.

use std::fmt::Write;

use super::{courses, curves, maps, plot, stacks};
use crate::error::LabError;
use crate::experiment::{PublishedColumn, PublishedRow, Workload};
use crate::result::{CellResult, Outcome, RunResult};
use crate::table;

const STYLE: &str = "\
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 1750px; padding: 0 1.5rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.35rem; margin-top: 2.5rem } h3 { font-size: 1.05rem; margin-top: 1.8rem }
p, li, dl { max-width: 60rem }
table { border-collapse: collapse; margin: .4rem 0 1rem } caption { text-align: left; font-weight: 600; padding: .3rem 0 }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .7rem; text-align: right; vertical-align: top }
th { border-bottom: 2px solid #888; font-weight: 600 } th:first-child, td:first-child { text-align: left }
table.words th, table.words td { text-align: left; max-width: 34rem }
.interval, .unit { color: #666; font-size: .82em; display: block; font-weight: 400 }
.here { color: #1f5f99; display: block }
caption .here { display: inline }
.plots { display: flex; flex-wrap: wrap; gap: 1rem } .plots svg { max-width: 100%; height: auto; border: 1px solid #eee }
.caution { background: #fff4d6; border-left: 4px solid #d9a400; padding: .5rem .9rem }
.reached { color: #17692f } .missed { color: #a61b1b } .undecided { color: #7a5b00 }
code { background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere }
dt { font-weight: 600; margin-top: .5rem } dd { margin-left: 1.2rem }
";

/// Makes the whole page.
pub(super) fn page(results: &[RunResult]) -> Result<String, LabError> {
    let mut page = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    page.push_str("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    let _ = writeln!(page, "<title>bareblk lab</title>\n<style>\n{STYLE}</style>\n</head>\n<body>");
    page.push_str("<h1>bareblk lab: published experiments, repeated</h1>\n");
    contents(&mut page, results);
    for result in results {
        section(&mut page, result)?;
    }
    page.push_str("</body>\n</html>\n");
    Ok(page)
}

fn contents(page: &mut String, results: &[RunResult]) {
    page.push_str("<ul>\n");
    for result in results {
        let (name, question) = (escape(&result.experiment.name), escape(&result.experiment.question));
        let _ = writeln!(page, "<li><a href=\"#{name}\">{name}</a>: {question}</li>");
    }
    page.push_str("</ul>\n");
}

fn section(page: &mut String, result: &RunResult) -> Result<(), LabError> {
    let experiment = &result.experiment;
    let (name, question) = (escape(&experiment.name), escape(&experiment.question));
    let _ = writeln!(page, "<h2 id=\"{name}\">{name}: {question}</h2>");
    if let Some(caution) = table::caution(result) {
        let _ = writeln!(page, "<p class=\"caution\">{}</p>", escape(&caution));
    }
    verdicts(page, result);
    page.push_str("<h3>Published and measured</h3>\n");
    published(page, result);
    let (first, second) = table::explanation(result);
    let _ = writeln!(page, "<p>{} {}</p>", escape(&first), escape(&second));
    page.push_str("<div class=\"plots\">\n");
    for curves in &experiment.curves {
        page.push_str(&curves::svg(result, curves)?);
    }
    for courses in &experiment.courses {
        page.push_str(&courses::svg(result, courses)?);
    }
    for map in &experiment.maps {
        page.push_str(&maps::svg(result, map)?);
    }
    page.push_str("</div>\n");
    for workload in &experiment.workloads {
        self::workload(page, result, workload)?;
    }
    differences(page, result);
    columns(page, result);
    machine(page, result);
    Ok(())
}

/// Writes the workload's table and plots, folded if a map shows the workload.
fn workload(page: &mut String, result: &RunResult, workload: &Workload) -> Result<(), LabError> {
    let experiment = &result.experiment;
    let is_folded = experiment.maps_show(workload);
    let label = escape(&workload.label);
    let _ = match is_folded {
        true => writeln!(page, "<details><summary>{label}</summary>"),
        false => writeln!(page, "<h3>{label}</h3>"),
    };
    measured(page, result, workload);
    page.push_str("<div class=\"plots\">\n");
    for plot in &experiment.plots {
        page.push_str(&plot::svg(result, workload, plot)?);
    }
    for stack in &experiment.stacks {
        page.push_str(&stacks::svg(result, workload, stack)?);
    }
    page.push_str(if is_folded { "</div>\n</details>\n" } else { "</div>\n" });
    Ok(())
}

fn verdicts(page: &mut String, result: &RunResult) {
    for verdict in &result.verdicts {
        let class = match verdict.outcome {
            Outcome::Reached => "reached",
            Outcome::Missed => "missed",
            Outcome::Undecided => "undecided",
        };
        let (word, target) = (verdict.outcome.word(), escape(&verdict.target));
        let open = if verdict.details.len() > table::MANY { "" } else { " open" };
        let _ = writeln!(
            page,
            "<details{open}><summary><strong class=\"{class}\">{word}</strong>: {target}</summary>\n<ul>"
        );
        verdict.details.iter().for_each(|detail| _ = writeln!(page, "<li>{}</li>", escape(detail)));
        page.push_str("</ul></details>\n");
    }
}

/// Writes the published table, with this run's figure below each published one.
fn published(page: &mut String, result: &RunResult) {
    let published = &result.experiment.published;
    let caption = escape(&published.caption);
    let _ =
        write!(page, "<table>\n<caption>{caption}: published, and <span class=\"here\">measured here</span>");
    page.push_str("</caption>\n<tr><th></th>");
    published.columns.iter().for_each(|column| _ = write!(page, "<th>{}</th>", escape(&column.title)));
    page.push_str("</tr>\n");
    for row in &published.rows {
        let (label, here) = (escape(&row.label), escape(result.label(&row.variant)));
        let _ = write!(page, "<tr><td>{label}<span class=\"here\">{here}</span></td>");
        for (place, column) in published.columns.iter().enumerate() {
            let there = row.figures.get(place).map_or(table::NONE, String::as_str);
            let here = measured_counterpart(result, row, column);
            let _ = write!(page, "<td>{}<span class=\"here\">{}</span></td>", escape(there), escape(&here));
        }
        page.push_str("</tr>\n");
    }
    let source = &result.experiment.source;
    let (title, year, setup) = (escape(&source.title), source.year, escape(&source.setup));
    let _ = writeln!(page, "</table>\n<p>Published in: {title}, {year}. Set-up: {setup}.</p>");
    let _ = writeln!(page, "<p>Its conclusion: {}</p>", escape(&published.conclusion));
}

/// The median of this run's figure; for a ratio, also its interval.
fn measured_counterpart(result: &RunResult, row: &PublishedRow, column: &PublishedColumn) -> String {
    let cell = result.cell(&column.workload, &row.variant);
    if let Some(cell) = cell.filter(|_| column.is_ratio) {
        return ratio(result, cell);
    }
    let summary = cell.and_then(|cell| cell.summary(&column.column));
    let known = result.experiment.columns.iter().find(|known| known.id == column.column);
    match (summary, known) {
        (Some(summary), Some(known)) => format!("{:.*}", known.decimals, summary.median),
        _ => table::NONE.to_owned(),
    }
}

fn ratio(result: &RunResult, cell: &CellResult) -> String {
    match table::percent(result, cell, "\n").split_once('\n') {
        Some((median, interval)) => format!("{median} % ({interval})"),
        None => table::NONE.to_owned(),
    }
}

fn measured(page: &mut String, result: &RunResult, workload: &Workload) {
    let _ = write!(page, "<table>\n<caption>Measured: {}</caption>\n<tr><th></th>", escape(&workload.label));
    let ratio = format!("<th>{}<span class=\"unit\">%</span></th>", escape(&result.experiment.ratio_title));
    for (place, column) in result.experiment.columns.iter().enumerate() {
        let (title, unit) = (escape(&column.title), escape(&column.unit));
        let _ = write!(page, "<th>{title}<span class=\"unit\">{unit}</span></th>");
        if place == 0 {
            page.push_str(&ratio);
        }
    }
    page.push_str("</tr>\n");
    result.cells_of(&workload.id).for_each(|cell| measured_row(page, result, cell));
    page.push_str("</table>\n");
}

fn measured_row(page: &mut String, result: &RunResult, cell: &CellResult) {
    let _ = write!(page, "<tr><td>{}</td>", escape(result.label(&cell.variant)));
    let columns = &result.experiment.columns;
    if let Some(why) = &cell.unavailable {
        let _ = write!(page, "<td colspan=\"{}\">not available: {}</td>", columns.len() + 1, escape(why));
    } else {
        for (place, (column, measure)) in columns.iter().zip(&cell.measures).enumerate() {
            figure(page, &table::figure(measure.summary, column, "\n"));
            if place == 0 {
                figure(page, &table::percent(result, cell, "\n"));
            }
        }
    }
    page.push_str("</tr>\n");
}

/// Writes a table cell. `text` is the median and the interval, separated by a line break.
fn figure(page: &mut String, text: &str) {
    let (median, interval) = text.split_once('\n').unwrap_or((text, ""));
    let _ = write!(page, "<td>{}<span class=\"interval\">{}</span></td>", escape(median), escape(interval));
}

fn differences(page: &mut String, result: &RunResult) {
    page.push_str("<h3>Differences from the original, and their reasons</h3>\n<table class=\"words\">\n");
    page.push_str("<tr><th>there</th><th>here</th><th>why</th></tr>\n");
    for difference in &result.experiment.differences {
        let words = [&difference.original, &difference.here, &difference.why].map(|word| escape(word));
        let _ = writeln!(page, "<tr><td>{}</td></tr>", words.join("</td><td>"));
    }
    page.push_str("</table>\n");
}

fn columns(page: &mut String, result: &RunResult) {
    page.push_str("<h3>Columns</h3>\n<dl>\n");
    for column in &result.experiment.columns {
        let (title, unit, measured) = (escape(&column.title), escape(&column.unit), escape(&column.measured));
        let _ = writeln!(page, "<dt>{title}, {unit}</dt><dd>{measured}</dd>");
    }
    page.push_str("</dl>\n");
}

fn machine(page: &mut String, result: &RunResult) {
    let (machine, effort) = (&result.machine, result.effort);
    let name = escape(&result.experiment.name);
    let _ = writeln!(
        page,
        "<h3>This run</h3>\n<p>To repeat it: <code>{}</code></p>\n<ul>",
        escape(&result.command)
    );
    let (cpu, kernel) = (escape(&machine.cpu), escape(&machine.kernel));
    let (cores, memory_mib) = (machine.cores, machine.memory_mib);
    let _ = writeln!(page, "<li>{cpu}, {cores} cores, {memory_mib} MiB of memory, {kernel}</li>");
    for storage in &machine.storages {
        let path = escape(&storage.path.display().to_string());
        let (label, kind) = (escape(&storage.label), escape(&storage.file_system));
        let _ = writeln!(page, "<li>{label}: {path} ({kind})</li>");
    }
    let (rounds, seconds, mib) = (effort.rounds, effort.seconds, effort.file_bytes >> 20);
    let _ = writeln!(page, "<li>{rounds} rounds of {seconds} s each, test files of {mib} MiB</li>");
    result.notes.iter().for_each(|note| _ = writeln!(page, "<li>{}</li>", escape(note)));
    let (program, date) = (escape(&result.program), escape(&result.date));
    let _ = writeln!(page, "<li>{program}, {date}; every sample is in {name}/result.json</li>\n</ul>");
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    #[test]
    fn page_has_the_published_and_the_measured_table() {
        let page = page(&[example::result()]).unwrap();
        assert!(page.contains("<td>guest, cache=off, linux-aio<span"), "{page}");
        assert!(
            page.contains("<td>bare metal, O_DIRECT</td><td>100.0<span class=\"interval\">98.0–102.0</span>")
        );
    }

    #[test]
    fn published_figure_has_the_measured_one_under_it() {
        let page = page(&[example::result()]).unwrap();
        assert!(page.contains("<td>61.2<span class=\"here\">100.0</span></td>"), "{page}");
        assert!(page.contains("<td>4.7<span class=\"here\">100.0</span></td>"), "{page}");
        assert!(page.contains("<td>61.1<span class=\"here\">–</span></td>"), "what was not measured");
    }

    #[test]
    fn published_ratio_has_the_measured_one_with_its_interval_under_it() {
        let mut result = example::result();
        result.experiment.published.columns[0].is_ratio = true;
        let page = page(&[result]).unwrap();
        assert!(page.contains("<td>4.7<span class=\"here\">101.1 % (90.0–112.2)</span></td>"), "{page}");
    }

    #[test]
    fn ratio_is_the_median_of_the_pairs_not_of_the_medians() {
        // The rounds are 90/100, none, 110/98.
        let page = page(&[example::result()]).unwrap();
        assert!(page.contains("<td>101.1<span class=\"interval\">90.0–112.2</span></td>"), "{page}");
    }

    #[test]
    fn what_was_not_measured_says_why() {
        let page = page(&[example::result()]).unwrap();
        assert!(page.contains("not available: posix-aio: &lt;no&gt; such engine"));
    }

    #[test]
    fn text_from_a_result_is_escaped() {
        let page = page(&[example::result()]).unwrap();
        assert!(page.contains("Measured: random &lt;writes&gt; &amp; more"));
        assert!(page.contains("<code>bareblk lab run aio --out &#39;a &amp; b&#39;</code>"));
        assert!(!page.contains("<writes>") && !page.contains("<no>"));
    }

    #[test]
    fn table_of_a_workload_in_a_map_is_folded() {
        let (result, _) = example::with_map();
        let with_map = page(&[result]).unwrap();
        assert!(with_map.contains("<details><summary>second</summary>\n<table>"), "{with_map}");
        assert!(with_map.contains("Throughput &lt;over&gt; the plane"), "no map");
        assert!(
            page(&[example::result()])
                .unwrap()
                .contains("<h3>random &lt;writes&gt; &amp; more</h3>\n<table>")
        );
    }

    #[test]
    fn few_rounds_carry_a_caution() {
        assert!(page(&[example::result()]).unwrap().contains("the intervals mean little"));
    }

    #[test]
    fn every_result_has_its_section_in_one_page() {
        let mut other = example::result();
        other.experiment.name = "kick".into();
        let page = page(&[example::result(), other]).unwrap();
        assert!(page.contains("<h2 id=\"aio\">") && page.contains("<h2 id=\"kick\">"));
        assert_eq!(page.matches("<html").count(), 1);
    }
}
