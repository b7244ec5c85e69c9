//! Splits Rust source text into code, comments and literals, as far as `tidy` needs it.
//!
//! Both views keep all line breaks, so that line numbers stay valid. It recognises comments (nested), strings (also raw
//! and byte strings), characters and lifetimes.

/// One file in two views.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceText {
    /// The file with comments and the contents of literals blanked.
    pub(crate) code: String,
    /// The file with the contents of literals blanked.
    pub(crate) code_and_comments: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

impl SourceText {
    pub(crate) fn new(text: &str) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let kinds = classify(&chars);
        let view = |keep: &dyn Fn(Kind) -> bool| {
            let pairs = chars.iter().zip(&kinds);
            pairs.map(|(c, kind)| if keep(*kind) || *c == '\n' { *c } else { ' ' }).collect()
        };
        Self {
            code: view(&|kind| kind == Kind::Code),
            code_and_comments: view(&|kind| kind != Kind::Literal),
        }
    }
}

fn classify(chars: &[char]) -> Vec<Kind> {
    let mut kinds = Vec::with_capacity(chars.len());
    while kinds.len() < chars.len() {
        let at = kinds.len();
        let (kind, end) = next_piece(chars, at);
        kinds.resize(end.clamp(at + 1, chars.len()), kind);
    }
    kinds
}

/// The kind of piece that starts at `at`, and where it ends.
fn next_piece(chars: &[char], at: usize) -> (Kind, usize) {
    let rest = &chars[at..];
    match rest {
        ['/', '/', ..] => (Kind::Comment, at + rest.iter().take_while(|c| **c != '\n').count()),
        ['/', '*', ..] => (Kind::Comment, block_comment_end(chars, at)),
        ['"', ..] => (Kind::Literal, string_end(chars, at + 1)),
        ['\'', '\\', ..] => (Kind::Literal, after(chars, at + 3, '\'')),
        ['\'', _, '\'', ..] => (Kind::Literal, at + 3),
        ['r', '"' | '#', ..] if !in_word(chars, at) => raw_string(chars, at),
        _ => (Kind::Code, at + 1),
    }
}

fn block_comment_end(chars: &[char], start: usize) -> usize {
    let mut depth = 0_usize;
    let mut at = start;
    while at < chars.len() {
        match &chars[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn string_end(chars: &[char], start: usize) -> usize {
    let mut at = start;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// Recognises `r"…"` and `r#"…"#`; `r#name` is code.
fn raw_string(chars: &[char], at: usize) -> (Kind, usize) {
    let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
    let open = at + 1 + hashes;
    if chars.get(open) != Some(&'"') {
        return (Kind::Code, open);
    }
    let mut end = open + 1;
    while end < chars.len() {
        let closes = chars[end] == '"'
            && chars[end + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
        end += 1;
        if closes {
            break;
        }
    }
    (Kind::Literal, end + hashes)
}

fn in_word(chars: &[char], at: usize) -> bool {
    // `br"…"` is a literal too, so a lone `b` does not count.
    let before = |back: usize| at.checked_sub(back).and_then(|index| chars.get(index)).copied();
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    is_word(before(1)) && (before(1) != Some('b') || is_word(before(2)))
}

fn after(chars: &[char], start: usize, wanted: char) -> usize {
    let start = start.min(chars.len());
    start + chars[start..].iter().take_while(|c| **c != wanted).count() + 1
}

/// A function and its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// Number of the line, counted from 1.
    pub(crate) line: usize,
    /// Number of lines from `fn` to the closing brace.
    pub(crate) length_lines: usize,
}

/// The functions with a body in `code` (comments and literals blanked).
pub(crate) fn functions(code: &str) -> Vec<Function> {
    let starts = words(code).filter(|(_, word)| *word == "fn").map(|(at, _)| at);
    starts.filter_map(|at| function_at(code, at)).collect()
}

fn function_at(code: &str, at: usize) -> Option<Function> {
    let (_, name) = words(&code[at..]).nth(1)?;
    let open = at + code[at..].find(['{', ';'])?;
    if code[open..].starts_with(';') && !signature_holds_semicolon(&code[at..=open]) {
        return None;
    }
    let open = at + code[at..].find('{')?;
    let close = matching_brace(code, open)?;
    let line = code[..at].matches('\n').count() + 1;
    Some(Function { name: name.to_owned(), line, length_lines: code[at..close].matches('\n').count() + 1 })
}

/// Whether the first `;` is inside the signature, as in `[u8; 4]`, and does not end it.
fn signature_holds_semicolon(signature: &str) -> bool {
    signature.matches('[').count() > signature.matches(']').count()
}

fn matching_brace(code: &str, open: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (offset, c) in code[open..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(open + offset);
        }
    }
    None
}

/// Words (letters, digits, `_`) with their byte offsets.
pub(crate) fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let split = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    split.filter(|word| !word.is_empty()).map(|word| (word.as_ptr().addr() - text.as_ptr().addr(), word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comment_and_string_are_blanked_and_lines_stay() {
        let text = SourceText::new("a // b\n\"c\nd\" /* e /* f */\n */ g\n");
        assert_eq!(text.code.split_whitespace().collect::<Vec<_>>(), ["a", "g"]);
        assert_eq!(text.code.matches('\n').count(), 4);
        assert!(text.code_and_comments.contains("// b") && !text.code_and_comments.contains('d'));
    }

    #[test]
    fn escaped_quote_does_not_end_a_string() {
        assert_eq!(SourceText::new(r#""a\"b" c"#).code.trim(), "c");
    }

    #[test]
    fn raw_strings_end_at_their_own_hashes() {
        assert_eq!(SourceText::new("r#\"a \" b\"# c br\"d\" e").code.split_whitespace().last(), Some("e"));
        assert!(!SourceText::new("r#\"a \" b\"# c").code.contains('b'));
    }

    #[test]
    fn raw_identifier_is_code() {
        assert_eq!(SourceText::new("r#type x").code, "r#type x");
    }

    #[test]
    fn lifetime_is_code_and_character_is_not() {
        assert_eq!(
            SourceText::new("&'a T '{' '\\'' x").code.split_whitespace().collect::<Vec<_>>(),
            ["&'a", "T", "x"]
        );
    }

    #[test]
    fn function_runs_from_fn_to_its_brace() {
        let found = functions("\nfn one() {\n  if x {\n  }\n}\nfn two();\nfn three(a: [u8; 2]) {}\n");
        let facts: Vec<_> = found.iter().map(|f| (f.name.as_str(), f.line, f.length_lines)).collect();
        assert_eq!(facts, [("one", 2, 4), ("three", 7, 1)]);
    }

    #[test]
    fn function_pointer_type_is_no_function() {
        assert_eq!(functions("type F = fn(u8) -> u8;\n"), []);
    }
}
