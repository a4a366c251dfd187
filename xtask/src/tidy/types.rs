//! Checks of the types of each crate: a name is declared once, in its product code.

use super::modules::test_files;
use super::source::{code, is_word, test_lines};
use super::{Finding, Tree};
use std::collections::{BTreeMap, HashMap};

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
    let outside_tests =
        code.lines().enumerate().filter(|(at, _)| !tests.iter().any(|test| test.contains(at)));
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
            ("crates/e/src/b.rs", "struct A;\n"),
        ];
        let findings = declared_twice(&tree(&files));
        assert_eq!(places(&findings), [("crates/a/src/c.rs", 2)]);
        assert!(findings[0].what.starts_with("crates/a/src/b.rs has a `B`"));
    }
}
