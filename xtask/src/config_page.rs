//! `bareblk.toml(5)`: the configuration file's manual page, generated from docs/reference/config.md.
//!
//! `markdown, line by line → headings, paragraphs, lists, tables, code → roff`
//!
//! - In a table whose first column is `key`, each row is an entry; the other columns are type, default and
//!   meaning.
//! - Only the markdown that this document uses is supported; everything else is copied as text.

/// The page's file name.
pub const FILE_NAME: &str = "bareblk.toml.5";

const BEGIN: &str = "\
.TH bareblk.toml 5 \"\" bareblk \"\"
.SH NAME
bareblk.toml \\- disks and settings of bareblk serve \\-\\-config
.SH DESCRIPTION
";
const END: &str = "\
.SH FILES
.TP
/etc/bareblk/bareblk.toml
what the service serves
.SH SEE ALSO
bareblk\\-serve(1), bareblk\\-ctl(1)
";

/// Converts the document to the page.
#[must_use]
pub fn page(markdown: &str) -> String {
    let mut page = Page { out: BEGIN.to_owned(), state: State::Text };
    // The title is the page's name, so it is skipped.
    markdown.lines().filter(|line| !line.starts_with("# ")).for_each(|line| page.line(line));
    page.out + END
}

/// The keys that a page has entries for, in the page's order.
#[must_use]
pub fn keys(page: &str) -> Vec<String> {
    let entries = page.lines().filter_map(|line| line.strip_prefix(ENTRY));
    let keys = entries.filter_map(|entry| entry.split("\\fR").next());
    keys.map(|key| key.replace("\\-", "-")).collect()
}

/// How a line with a key begins.
const ENTRY: &str = "\\fB\\&";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Text,
    Code,
    /// A table whose rows are entries.
    Keys,
    Table,
}

struct Page {
    out: String,
    state: State,
}

impl Page {
    fn line(&mut self, line: &str) {
        if line.starts_with("```") {
            let ends = self.state == State::Code;
            self.state = if ends { State::Text } else { State::Code };
            self.command(if ends { "fi" } else { "nf" });
        } else if self.state == State::Code {
            self.text(&escaped(line));
        } else if let Some(row) = line.strip_prefix('|') {
            self.row(row);
        } else {
            self.state = State::Text;
            self.prose(line);
        }
    }

    fn prose(&mut self, line: &str) {
        if let Some(heading) = line.strip_prefix("## ") {
            self.command(&format!("SH \"{}\"", inline(&heading.to_uppercase())));
        } else if let Some(heading) = line.strip_prefix("### ") {
            self.command(&format!("SS \"{}\"", inline(heading)));
        } else if let Some(item) = line.strip_prefix("- ") {
            self.command("IP \\(bu 2");
            self.text(&inline(item));
        } else if line.is_empty() {
            self.command("PP");
        } else {
            self.text(&inline(line.trim_start()));
        }
    }

    fn row(&mut self, row: &str) {
        let cells: Vec<&str> = row.trim_end_matches('|').split(" | ").map(str::trim).collect();
        let begins = !matches!(self.state, State::Keys | State::Table);
        match cells.as_slice() {
            ["key", ..] if begins => self.state = State::Keys,
            _ if begins => self.state = State::Table,
            [rule, ..] if rule.starts_with("---") => {}
            [key, kind, default, meaning] if self.state == State::Keys => {
                self.command("TP");
                let key = key.trim_matches('`').replace('-', "\\-");
                self.out.push_str(&format!("{ENTRY}{key}\\fR = {}\n", inline(kind)));
                self.text(&format!("{} [default: {}]", inline(meaning), inline(default)));
            }
            [first, rest @ ..] => {
                self.command("TP");
                self.text(&inline(first));
                self.text(&inline(&rest.join("; ")));
            }
            [] => {}
        }
    }

    fn command(&mut self, command: &str) {
        self.out.push_str(&format!(".{command}\n"));
    }

    /// A period at the start of a line would make it a command, so it is hidden.
    fn text(&mut self, text: &str) {
        let hidden = if text.starts_with(['.', '\'']) { "\\&" } else { "" };
        self.out.push_str(&format!("{hidden}{text}\n"));
    }
}

/// Formats `` `code` `` in bold, and `[text](link)` as text.
fn inline(text: &str) -> String {
    let mut shown = String::new();
    for (place, part) in text.split('`').enumerate() {
        let part = escaped(&if place % 2 == 0 { without_links(part) } else { part.to_owned() });
        shown.push_str(&if place % 2 == 0 { part } else { format!("\\fB{part}\\fR") });
    }
    shown
}

fn without_links(text: &str) -> String {
    let mut plain = text.to_owned();
    while let Some(middle) = plain.find("](") {
        let (Some(begin), Some(length)) = (plain[..middle].rfind('['), plain[middle..].find(')')) else {
            break;
        };
        let shown = plain[begin + 1..middle].to_owned();
        plain.replace_range(begin..=middle + length, &shown);
    }
    plain
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-").replace('"', "\\(dq")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(markdown: &str) -> String {
        page(markdown).strip_prefix(BEGIN).unwrap().strip_suffix(END).unwrap().to_owned()
    }

    #[test]
    fn row_of_keys_is_an_entry_with_type_meaning_and_default() {
        let table = "| key | type | default | meaning |\n|---|---|---|---|\n| `poll-us` | 0 to 5 | 50 | see [x](x.md) |\n";
        assert_eq!(body(table), ".TP\n\\fB\\&poll\\-us\\fR = 0 to 5\nsee x [default: 50]\n");
        assert_eq!(keys(&page(table)), ["poll-us"]);
    }

    #[test]
    fn other_rows_are_entries_without_a_key() {
        let table = "| difference | what happens |\n|---|---|\n| `a`, `b` | nothing |\n";
        assert_eq!(body(table), ".TP\n\\fBa\\fR, \\fBb\\fR\nnothing\n");
        assert!(keys(&page(table)).is_empty());
    }

    #[test]
    fn headings_lists_and_code_are_the_typesetters() {
        let text = "# Title\n\n## `[[disk]]` now\n\n- one\n  more\n\n```text\n.x \"a\\b\n```\n";
        let expected = ".PP\n.SH \"\\fB[[DISK]]\\fR NOW\"\n.PP\n.IP \\(bu 2\none\nmore\n.PP\n.nf\n\\&.x \\(dqa\\eb\n.fi\n";
        assert_eq!(body(text), expected);
    }
}
