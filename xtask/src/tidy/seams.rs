//! Checks that the traits between the parts of a target stay narrow.
//!
//! Limits once added five methods to the trait of all target sessions, one issue after it was made.
//! A feature that needs another call has to find another place, or a decision that says why.

use super::source::code;
use super::{Finding, Tree};

/// Reports seam traits with more methods than [`SEAMS`] says, and entries of that list with fewer.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    check_those(tree, SEAMS)
}

fn check_those(tree: &Tree, seams: &[(&str, &str, usize)]) -> Vec<Finding> {
    let findings = seams.iter().filter_map(|(path, name, most)| {
        let Some((line, count)) = methods(tree.content(path), name) else {
            return Some(Finding::new(LIST, 1, format!("{path} has no trait `{name}`; change the list")));
        };
        if count > *most {
            let what = format!(
                "`{name}` has {count} methods, at most {most}: a seam stays narrow (decision 90); call the feature elsewhere"
            );
            return Some(Finding::new(path, line, what));
        }
        let what = || format!("`{name}` has {count} methods now; change the list");
        (count < *most).then(|| Finding::new(LIST, 1, what()))
    });
    findings.collect()
}

/// The line, from 1, and the number of methods of a trait.
fn methods(source: &str, name: &str) -> Option<(usize, usize)> {
    let code = code(source);
    let is_head = |line: &str| {
        let rest = line.split_once("trait ").and_then(|(_, rest)| rest.strip_prefix(name));
        !line.starts_with(' ') && rest.is_some_and(|rest| rest.starts_with([':', '<', ' ']))
    };
    let at = code.lines().position(is_head)?;
    let body = code.lines().skip(at).take_while(|line| *line != "}");
    Some((at + 1, body.filter(|line| line.starts_with("    fn ")).count()))
}

/// Most methods of each seam trait, accessors included: file, trait, number.
const SEAMS: &[(&str, &str, usize)] = &[
    ("crates/proto/src/driver/session.rs", "StreamSession", 7),
    ("crates/proto/src/driver/target.rs", "IoSource", 6),
    ("crates/proto/src/driver/target.rs", "TargetLifecycle", 9),
    ("crates/engine/src/carrier/mod.rs", "Carrier", 17),
];

const LIST: &str = "xtask/src/tidy/seams.rs";

#[cfg(test)]
mod tests {
    use super::super::tests::{places, tree};
    use super::*;

    #[test]
    fn a_trait_with_more_or_fewer_methods_than_listed_is_found() {
        let source = "/// fn a();\npub trait Seam<S>: Timed {\n    type A;\n\n    fn a(&self);\n\n    fn b(&self) {\n        fn c() {}\n    }\n}\n\ntrait SeamOther {\n    fn d();\n}\n";
        let tree = tree(&[("a.rs", source)]);
        let found = |name, most| check_those(&tree, &[("a.rs", name, most)]);
        assert_eq!(found("Seam", 2), []);
        assert_eq!(places(&found("Seam", 1)), [("a.rs", 2)]);
        assert_eq!(places(&found("Seam", 3)), [(LIST, 1)]);
        assert_eq!(places(&found("Missing", 1)), [(LIST, 1)]);
        assert_eq!(found("SeamOther", 1), []);
    }
}
