//! Checks of the types of each crate, in its product code: a name is declared once, and the
//! inherent methods of a type are in few files.

use super::modules::test_files;
use super::source::{code, is_word, test_lines};
use super::{Finding, Tree};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Reports types and traits whose name another file of their crate declares, too.
pub(super) fn declared_twice(tree: &Tree) -> Vec<Finding> {
    let tests = test_files(tree);
    let mut first: HashMap<(String, String), String> = HashMap::new();
    let mut findings = Vec::new();
    for (path, source) in tree.ending(".rs").filter(|(path, _)| !tests.contains(*path)) {
        let Some((root, _)) = path.split_once("/src/").filter(|(root, _)| root.starts_with("crates/")) else {
            continue;
        };
        for (line, name) in declared(source) {
            match first.get(&(root.to_owned(), name.clone())) {
                Some(other) if other != path => {
                    let what = format!("{other} has a `{name}`, too; give each type of a crate its own name");
                    findings.push(Finding::new(path, line, what));
                }
                Some(_) => {}
                None => {
                    first.insert((root.to_owned(), name), path.to_owned());
                }
            }
        }
    }
    findings
}

/// The types and traits that product code declares outside of other items, with their lines from 1.
fn declared(source: &str) -> BTreeMap<usize, String> {
    let tests = test_lines(source);
    let code = code(source);
    let mut in_layout = false;
    let outer = code.lines().map(move |line| {
        in_layout = if line.starts_with(' ') || line.is_empty() { in_layout } else { line.ends_with(LAYOUT) };
        if in_layout { line.strip_prefix("    ").unwrap_or(line) } else { line }
    });
    let outside_tests = outer.enumerate().filter(|(at, _)| !tests.iter().any(|test| test.contains(at)));
    let declared = outside_tests.filter_map(|(at, line)| {
        let item = line.strip_prefix("pub").map_or(line, |rest| match rest.strip_prefix('(') {
            Some(rest) => rest.split_once(')').map_or(rest, |(_, rest)| rest),
            None => rest,
        });
        let item = item.trim_start_matches(' ');
        let item = item.strip_prefix("unsafe ").unwrap_or(item);
        // Items within functions and other modules are indented.
        let is_outer = !line.starts_with(' ');
        let name = KINDS.iter().find_map(|kind| item.strip_prefix(kind)).filter(|_| is_outer)?;
        Some((at + 1, name.chars().take_while(|c| is_word(*c)).collect()))
    });
    declared.collect()
}

/// The end of the line that begins a block of `layout!` or `native_layout!` of `blockmux-wire`. The
/// structures in it are indented.
const LAYOUT: &str = "layout! {";

/// Reports types whose inherent methods are in more than [`MAX_FILES`] files and in more than
/// [`SCATTERED`] says, and types of that list with fewer.
pub(super) fn scattered(tree: &Tree) -> Vec<Finding> {
    scattered_but(tree, SCATTERED)
}

fn scattered_but(tree: &Tree, known: &[(&str, usize, &str)]) -> Vec<Finding> {
    let impls = impls(tree);
    let many = impls.iter().filter(|((_, name), files)| {
        let most = known.iter().find(|(known, ..)| known == name).map_or(MAX_FILES, |(_, most, _)| *most);
        files.len() > most
    });
    let many = many.map(|((_, name), files)| {
        let what = format!(
            "the methods of `{name}` are in {} files; make a part of it a type of its own: {}",
            files.len(),
            files.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
        );
        Finding::new(files.first().map_or(LIST, String::as_str), 1, what)
    });
    let stale = known.iter().filter(|(known, most, _)| {
        let count = |((_, name), files): (&(String, String), &BTreeSet<String>)| {
            (name == known).then_some(files.len())
        };
        impls.iter().filter_map(count).max().unwrap_or_default() < *most
    });
    let stale = stale.map(|(name, ..)| {
        Finding::new(LIST, 1, format!("`{name}` has its methods in fewer files now; change the list"))
    });
    many.chain(stale).collect()
}

/// Most files with inherent methods of one type.
const MAX_FILES: usize = 4;

/// Types with more files: how many, and why. This list only becomes shorter.
const SCATTERED: &[(&str, usize, &str)] = &[
    ("CommandQueue", 6, "one generic queue, and what SCSI and NVMe each add to it (decision 48)"),
    ("ControllerQueue", 8, "one state machine, with what each transport adds to it"),
];

const LIST: &str = "xtask/src/tidy/types.rs";

/// The files with inherent methods of each type, by crate and name. Aliases are resolved.
fn impls(tree: &Tree) -> BTreeMap<(String, String), BTreeSet<String>> {
    let tests = test_files(tree);
    let mut aliases: HashMap<(String, String), String> = HashMap::new();
    let mut found = Vec::new();
    for (path, source) in tree.ending(".rs").filter(|(path, _)| !tests.contains(*path)) {
        let Some((root, _)) = path.split_once("/src/").filter(|(root, _)| root.starts_with("crates/")) else {
            continue;
        };
        let tests = test_lines(source);
        let code = code(source);
        let of_crate = |name: &str| (root.to_owned(), name.to_owned());
        let renamed: HashMap<&str, &str> = renamed(&code).collect();
        let mut start = 0;
        for (at, line) in code.lines().enumerate() {
            if !tests.iter().any(|test| test.contains(&at)) {
                aliases.extend(alias(line).map(|(alias, name)| (of_crate(alias), name.to_owned())));
                let name = inherent(&code[start..]);
                found.extend(name.map(|name| (of_crate(renamed.get(name).unwrap_or(&name)), path)));
            }
            start += line.len() + 1;
        }
    }
    let mut impls: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    for (mut of, path) in found {
        for _ in 0..MAX_ALIASES {
            of.1 = aliases.get(&of).unwrap_or(&of.1).clone();
        }
        impls.entry(of).or_default().insert(path.to_owned());
    }
    impls
}

/// Aliases of aliases that are resolved.
const MAX_ALIASES: usize = 4;

/// The type of the inherent `impl` at the start of `code`.
fn inherent(code: &str) -> Option<&str> {
    let mut head = code.strip_prefix("impl").and_then(|rest| rest.split('{').next())?;
    if head.starts_with('<') {
        let mut depth = 0;
        let end = head.char_indices().find(|&(at, c)| {
            depth += i32::from(c == '<') - i32::from(c == '>' && !head[..at].ends_with('-'));
            depth == 0
        })?;
        head = &head[end.0 + 1..];
    }
    let head = head.split(" where").next()?.trim();
    let is_trait = head.split_whitespace().any(|word| word == "for");
    (!is_trait).then(|| last_name(head))
}

/// The alias and the type of a `type` item in `line`.
fn alias(line: &str) -> Option<(&str, &str)> {
    let (before, rest) = line.split_once("type ")?;
    let is_item = before.is_empty() || (before.starts_with("pub") && !before.contains('='));
    let (alias, of) = rest.split_once('=').filter(|_| is_item)?;
    let alias = alias.split(|c| !is_word(c)).next()?;
    Some((alias, last_name(of.trim())))
}

/// The new and the old name of each `as` of `code`.
fn renamed(code: &str) -> impl Iterator<Item = (&str, &str)> {
    let last = |text: &'_ str| text.len() - text.chars().rev().take_while(|c| is_word(*c)).count();
    code.match_indices(" as ").map(move |(at, found)| {
        let (old, new) = (&code[..at], &code[at + found.len()..]);
        (&new[..new.find(|c| !is_word(c)).unwrap_or(new.len())], &old[last(old)..])
    })
}

/// The last name of the path that a type begins with, without its parameters.
fn last_name(path: &str) -> &str {
    let path = path.split(|c| !is_word(c) && c != ':').next().unwrap_or_default();
    path.rsplit(':').next().unwrap_or_default()
}

const KINDS: &[&str] = &["struct ", "enum ", "union ", "trait ", "type "];

#[cfg(test)]
mod tests {
    use super::super::tests::{places, tree};
    use super::*;

    #[test]
    fn a_name_that_two_files_of_a_crate_declare_is_found() {
        let files = [
            ("crates/a/src/b.rs", "pub struct A;\nstruct B<T>(T);\n"),
            ("crates/a/src/c.rs", "\npub(super) enum B {}\nimpl D for B {\n    type A = u8;\n}\n"),
            ("crates/a/src/d.rs", "// struct A;\n#[cfg(test)]\nmod tests {\n    struct B;\n}\n"),
            (
                "crates/a/src/f.rs",
                "layout! {\n    pub struct A(4) {\n        a: u8,\n    }\n}\nfn b() {\n    struct B;\n}\n",
            ),
            ("crates/e/src/b.rs", "struct A;\n"),
        ];
        let findings = declared_twice(&tree(&files));
        assert_eq!(places(&findings), [("crates/a/src/c.rs", 2), ("crates/a/src/f.rs", 2)]);
        assert!(findings[0].what.starts_with("crates/a/src/b.rs has a `B`"));
    }

    #[test]
    fn methods_in_many_files_are_found_also_those_of_aliases() {
        let file = |nth: usize, text: &str| (format!("crates/a/src/f{nth}.rs"), text.to_owned());
        let files: Vec<(String, String)> = [
            "struct Queue<T>(T);\nimpl<T: Into<u8>> Queue<T> {\n}\n",
            "pub(crate) type ByteQueue = super::Queue<u8>;\nimpl ByteQueue {\n}\n",
            "use crate::ByteQueue as Bytes;\nimpl Bytes {\n}\n",
            "impl<T> f0::Queue<T>\nwhere\n    T: Copy,\n{\n}\n",
            "impl<T> Clone for Queue<T> {\n}\n#[cfg(test)]\nmod tests {\n    impl Queue<u8> {\n    }\n}\n",
            "impl Queue<fn(u8) -> u8> {\n}\n",
        ]
        .into_iter()
        .enumerate()
        .map(|(nth, text)| file(nth, text))
        .collect();
        let files: Vec<(&str, &str)> =
            files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
        let tree = tree(&files);
        let findings = scattered_but(&tree, &[]);
        assert_eq!(places(&findings), [("crates/a/src/f0.rs", 1)]);
        assert!(findings[0].what.starts_with("the methods of `Queue` are in 5 files"), "{}", findings[0]);
        assert_eq!(scattered_but(&tree, &[("Queue", 5, "")]), []);
        assert_eq!(places(&scattered_but(&tree, &[("Queue", 6, "")])), [(LIST, 1)]);
    }
}
