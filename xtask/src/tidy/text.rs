//! Checks of files as text: length, comments, words, links.

use super::source::test_lines;
use super::{Finding, Tree, modules};

/// Runs every rule of this module.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let test_files = modules::test_files(tree);
    let mut findings = Vec::new();
    for (path, source) in tree.ending(".rs") {
        if !test_files.contains(path) {
            findings.extend(too_long(path, source));
        }
        findings.extend(stray_space(path, source));
        findings.extend(comments(path, source));
        findings.extend(identifiers(path, source));
    }
    for (path, text) in tree.all().filter(|(path, _)| is_written_here(path)) {
        findings.extend(markers(path, text));
        findings.extend(machine_paths(path, text));
    }
    for (path, text) in tree.ending(".md") {
        findings.extend(wide_lines(path, text));
        findings.extend(broken_links(tree, path, text));
        findings.extend(missing_functions(tree, path, text));
        findings.extend(missing_sources(tree, path, text));
    }
    findings
}

fn is_written_here(path: &str) -> bool {
    [".rs", ".md", ".toml", ".html", ".css", ".js", ".py", ".sh"].iter().any(|end| path.ends_with(end))
        || ["Makefile", ".ci/run"].contains(&path)
}

/// Reports a file with too many lines, not counting tests.
fn too_long(path: &str, source: &str) -> Option<Finding> {
    let tests: usize = test_lines(source).iter().map(ExactSizeIterator::len).sum();
    let lines = source.lines().count() - tests;
    (lines > MAX_LINES).then(|| {
        let what = format!("{lines} lines without tests, {MAX_LINES} allowed; split the file");
        Finding::new(path, MAX_LINES, what)
    })
}

fn stray_space(path: &str, source: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, line) in source.lines().enumerate() {
        if line.contains('\t') {
            findings.push(Finding::new(path, at + 1, "a tab; indent with spaces, write \\t in literals"));
        }
        if line.ends_with(char::is_whitespace) {
            findings.push(Finding::new(path, at + 1, "space at the end of the line; remove it"));
        }
    }
    findings
}

/// Reports comments that are too wide, depend on a neighbour that rustdoc shows elsewhere, or use
/// home-made words.
fn comments(path: &str, source: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, line) in source.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("//") else { continue };
        let is_doc = comment.starts_with(['/', '!']);
        let text = comment.trim_start_matches(['/', '!']).trim_start();
        // Drawings and tables may be wider.
        let is_drawn = line.contains(DRAWN) || text.contains("  ") || comment.contains("   ");
        if line.chars().count() > MAX_COMMENT_WIDTH && !is_drawn {
            let what = format!("a comment wider than {MAX_COMMENT_WIDTH} characters; break the line");
            findings.push(Finding::new(path, at + 1, what));
        }
        if is_doc && DEPENDENT_STARTS.iter().any(|start| text.starts_with(start)) {
            findings.push(Finding::new(path, at + 1, "depends on a neighbour; describe this item alone"));
        }
        let words: Vec<_> = text.split(|c: char| !c.is_ascii_alphabetic()).map(str::to_lowercase).collect();
        findings.extend(home_made(path, at + 1, &words));
    }
    findings
}

/// Reports identifiers that contain home-made words.
fn identifiers(path: &str, source: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, line) in source.lines().enumerate() {
        // Literals and comments are not split exactly: they may contain no such word either.
        let code = line.split("//").next().unwrap_or_default();
        let words: Vec<_> = code
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|word| word.contains('_') || word.chars().any(char::is_uppercase))
            .flat_map(words_of)
            .collect();
        findings.extend(home_made(path, at + 1, &words));
    }
    findings
}

/// The words of an identifier in `snake_case` or `CamelCase`, in lower case.
fn words_of(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for c in identifier.chars() {
        if c == '_' || (c.is_uppercase() && was_lower) {
            words.push(String::new());
        }
        if let Some(word) = words.last_mut().filter(|_| c != '_') {
            word.extend(c.to_lowercase());
        }
        was_lower = c.is_lowercase();
    }
    words
}

/// Reports the home-made words among `words`.
fn home_made(path: &str, line: usize, words: &[String]) -> Vec<Finding> {
    let found = HOME_MADE.iter().filter(|(ours, _)| words.iter().any(|word| word == ours));
    found
        .map(|(ours, theirs)| {
            Finding::new(path, line, format!("\"{ours}\" is a home-made word; write \"{theirs}\""))
        })
        .collect()
}

/// Reports notes such as to-do marks.
fn markers(path: &str, text: &str) -> Vec<Finding> {
    let marked =
        |line: &str| line.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| MARKERS.contains(&word));
    lines_where(text, marked)
        .map(|at| Finding::new(path, at, "an unfinished note; do it now, or open an issue"))
        .collect()
}

/// Reports paths that exist on one machine only.
fn machine_paths(path: &str, text: &str) -> Vec<Finding> {
    let local = |line: &str| MACHINE_PATHS.iter().any(|start| line.contains(start));
    lines_where(text, local)
        .map(|at| Finding::new(path, at, "a path of one machine; take it as an argument, or use tempfile"))
        .collect()
}

fn wide_lines(path: &str, text: &str) -> Vec<Finding> {
    let wide = |line: &str| line.chars().count() > MAX_DOC_WIDTH;
    lines_where(text, wide)
        .map(|at| Finding::new(path, at, format!("wider than {MAX_DOC_WIDTH} characters; break the line")))
        .collect()
}

/// Reports links to files and to sections that do not exist.
fn broken_links(tree: &Tree, path: &str, text: &str) -> Vec<Finding> {
    let (mut findings, mut fenced) = (Vec::new(), false);
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        for link in links(line).filter(|link| !fenced && !link.contains(':')) {
            let link = link.split(' ').next().unwrap_or_default();
            let (file, section) = link.split_once('#').unwrap_or((link, ""));
            let page = if file.is_empty() { path.to_owned() } else { resolved(path, file) };
            if !tree.has(&page) {
                findings.push(Finding::new(path, at + 1, format!("{file} does not exist; mend the link")));
            } else if !section.is_empty() && page.ends_with(".md") && !has_section(tree, &page, section) {
                let what = format!("{page} has no section #{section}; mend the link");
                findings.push(Finding::new(path, at + 1, what));
            }
        }
    }
    findings
}

/// Whether a page has a heading with this anchor, as GitHub derives anchors from headings.
fn has_section(tree: &Tree, page: &str, anchor: &str) -> bool {
    let headings = |text: &str| text.lines().any(|line| line.starts_with('#') && anchor_of(line) == anchor);
    tree.ending(page).any(|(path, text)| path == page && headings(text))
}

/// The anchor of a heading: lower case, spaces become hyphens, punctuation is dropped.
fn anchor_of(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Targets of `[text](link)` and `![text](link)`.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

/// Reports references such as `file.rs::function` and `file.sh::check` to tests that do not exist.
fn missing_functions(tree: &Tree, path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, line) in text.lines().enumerate() {
        for code in code_spans(line) {
            let Some((file, name)) = code.split_once("::") else { continue };
            let declared = match file.rsplit_once('.') {
                Some((_, "rs")) => format!("fn {name}("),
                Some((_, "sh")) => format!("\ncheck {name}\n"),
                _ => continue,
            };
            if !tree.ending(&format!("/{file}")).any(|(_, source)| source.contains(&declared)) {
                let what = format!("no {file} has {name}; correct the reference");
                findings.push(Finding::new(path, at + 1, what));
            }
        }
    }
    findings
}

/// Reports references to sources that do not exist; long tables omit `crates/`.
fn missing_sources(tree: &Tree, path: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let sources = code_spans(line).filter(|code| code.contains("/src/") || code.contains("/tests/"));
        for source in sources.filter(|code| !code.contains(char::is_whitespace)) {
            let file = source.split("::").next().unwrap_or_default().trim_end_matches('/');
            if !tree.has(file) && !tree.has(&format!("crates/{file}")) {
                findings.push(Finding::new(
                    path,
                    at + 1,
                    format!("{source} does not exist; correct the path"),
                ));
            }
        }
    }
    findings
}

/// The text between backquotes.
fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// `link` in the document at `path`, resolved from the root.
fn resolved(path: &str, link: &str) -> String {
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Numbers, from 1, of the lines for which `is_so` is true.
fn lines_where(text: &str, is_so: impl Fn(&str) -> bool) -> impl Iterator<Item = usize> {
    text.lines().enumerate().filter(move |(_, line)| is_so(line)).map(|(at, _)| at + 1)
}

/// Lines of a source, not counting tests.
const MAX_LINES: usize = 900;

/// Width of a document's line, in characters.
const MAX_DOC_WIDTH: usize = 400;

/// Width of a comment's line, in characters.
const MAX_COMMENT_WIDTH: usize = 100;

/// Characters of drawings and tables.
const DRAWN: &[char] = &['─', '│', '▶', '◀', '|', '┌', '└'];

/// Beginnings of doc comments that depend on a neighbour.
const DEPENDENT_STARTS: &[&str] = &["The same", "As above", "Likewise"];

/// Home-made words, and the words to use instead.
const HOME_MADE: &[(&str, &str)] = &[
    ("bell", "waker"),
    ("bells", "wakers"),
    ("desk", "control server"),
    ("doom", "abort"),
    ("doomed", "aborted"),
    ("entrance", "login phase"),
    ("hurry", "retry now"),
    ("lane", "connection, or case of a bench"),
    ("lanes", "connections, or cases of a bench"),
    ("letterbox", "event queue"),
    ("manners", "protocol rules"),
    ("parting", "logout"),
    ("passage", "I/O guard"),
    ("patience", "timeout"),
    ("weather", "network conditions"),
];

// Split, because this file is checked, too.
const MARKERS: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
const MACHINE_PATHS: [&str; 4] =
    [concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/tm", "p/"), concat!("/Us", "ers/")];

#[cfg(test)]
mod tests {
    use super::super::tests::{places, tree};
    use super::*;

    #[test]
    fn a_long_file_is_two_ideas_but_its_tests_do_not_count() {
        let code = "fn f() {}\n".repeat(MAX_LINES);
        let tests = format!("{code}#[cfg(test)]\nmod tests {{\n{}}}\n", "    fn g() {}\n".repeat(100));
        assert_eq!(too_long("a.rs", &tests), None);
        let finding = too_long("a.rs", &format!("{code}fn f() {{}}\n")).unwrap();
        assert!(finding.to_string().starts_with("a.rs:900: 901 lines without tests, 900 allowed"));
    }

    #[test]
    fn a_file_of_tests_may_be_long() {
        let long = format!("//! A.\n{}", "fn f() {}\n".repeat(2 * MAX_LINES));
        assert!(check(&tree(&[("crates/a/tests/pair.rs", &long)])).is_empty());
        assert_eq!(
            places(&check(&tree(&[("crates/a/src/pair.rs", &long)]))),
            [("crates/a/src/pair.rs", 900)]
        );
    }

    #[test]
    fn tabs_and_spaces_at_line_ends_are_found() {
        assert_eq!(places(&stray_space("a.rs", "a\n\tb\nc \nd")), [("a.rs", 2), ("a.rs", 3)]);
    }

    #[test]
    fn notes_to_oneself_are_found_as_words() {
        let text = format!("{}: x\n{}LIST\n// ({})", MARKERS[0], MARKERS[0], MARKERS[2]);
        assert_eq!(places(&markers("a.md", &text)), [("a.md", 1), ("a.md", 3)]);
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        let text = format!("/usr/bin\n\"{}me\"", MACHINE_PATHS[0]);
        assert_eq!(places(&machine_paths("a.rs", &text)), [("a.rs", 2)]);
    }

    #[test]
    fn a_comment_is_narrow_stands_alone_and_is_in_the_fields_words() {
        let wide = "x".repeat(MAX_COMMENT_WIDTH);
        let source = format!(
            "// {wide}\n//   a ──▶ {wide}\nlet a = \"{wide}\";\n/// The same for b.\n// The same for b.\n// A lane, planes.\n"
        );
        assert_eq!(places(&comments("a.rs", &source)), [("a.rs", 1), ("a.rs", 4), ("a.rs", 6)]);
    }

    #[test]
    fn identifiers_are_in_the_fields_words() {
        let (snake, camel, constant) = ("lane", concat!("La", "ne"), concat!("LA", "NE"));
        let source = format!(
            "let doorbell = planes;\nfn next_{snake}() {{}}\nstruct {camel}Table;\nconst {constant}: u8 = 1;\n"
        );
        assert_eq!(places(&identifiers("a.rs", &source)), [("a.rs", 2), ("a.rs", 3), ("a.rs", 4)]);
        assert_eq!(words_of("TlsMode"), ["tls", "mode"]);
        assert_eq!(words_of("READY_TIMEOUT"), ["ready", "timeout"]);
    }

    #[test]
    fn a_document_with_a_very_wide_line_is_found() {
        let text = format!("{}\n{}", "x".repeat(MAX_DOC_WIDTH), "x".repeat(MAX_DOC_WIDTH + 1));
        assert_eq!(places(&wide_lines("a.md", &text)), [("a.md", 2)]);
    }

    #[test]
    fn functions_that_a_page_names_exist() {
        let page =
            "`a.rs::holds` `b/a.rs::holds` and `a.rs`\n`a.rs::hold`\n`c.rs::holds` code::path `Type::new`\n";
        let tree = tree(&[("x/b/a.rs", "fn holds() {}\n"), ("page.md", page)]);
        let findings = missing_functions(&tree, "page.md", page);
        assert_eq!(places(&findings), [("page.md", 2), ("page.md", 3)]);
    }

    #[test]
    fn checks_of_scripts_that_a_page_names_exist() {
        let page = "`vm.sh::it_boots` `vm.sh`\n`vm.sh::it_boot`\n";
        let tree = tree(&[("tests/vm.sh", "# A.\ncheck it_boots\ntrue\n"), ("page.md", page)]);
        assert_eq!(places(&missing_functions(&tree, "page.md", page)), [("page.md", 2)]);
    }

    #[test]
    fn sources_that_a_page_names_exist() {
        let page = "`crates/a/src/b.rs` `a/src/b.rs::f` `a/src/`\n`crates/a/src/c.rs`\n`b.rs` `cp a/src/x y`\n`a/tests/`\n";
        let tree = tree(&[("crates/a/src/b.rs", "")]);
        assert_eq!(places(&missing_sources(&tree, "page.md", page)), [("page.md", 2), ("page.md", 4)]);
    }

    #[test]
    fn links_lead_to_files_and_sections() {
        let text = "\
# A part
[a](B.md#the-first-nvmetcp-part_1) [web](https://example.org/x) [here](#a-part) ![up](../pic.png)
[gone](C.md) and [dir](../docs)
```
[code](is.not)
```
[out](../gone.md)
[section](B.md#second) [other](#other)
";
        let other = "## The first: NVMe/TCP, `part_1`\n";
        let tree = tree(&[("docs/A.md", text), ("docs/B.md", other), ("pic.png", "")]);
        let expected = [("docs/A.md", 3), ("docs/A.md", 7), ("docs/A.md", 8), ("docs/A.md", 8)];
        assert_eq!(places(&broken_links(&tree, "docs/A.md", text)), expected);
    }
}
