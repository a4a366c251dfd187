//! Reads a config file and the files that it includes into one table, and finds the file and line
//! that a message is about.
//!
//! `include = "DIR"` reads every `*.toml` of a directory in the order of their names. Lists of all
//! files are concatenated; a single value may be in one file only.

use super::setup::VOLUMES;
use crate::failure::Failure;
use crate::process::regular;
use crate::protocol::by_name;
use blockmux_lab::options::nearest;
use blockmux_volume::units::human_size;
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue, ValueDeserializer};

/// The texts of all config files, the main file first.
#[derive(Clone, Debug)]
pub(super) struct Sources {
    files: Vec<SourceFile>,
    named: Vec<NamedList>,
    /// The texts are generated, so messages name no file and line.
    is_generated: bool,
}

/// A list of tables whose entries have names.
#[derive(Clone, Debug)]
pub(super) struct NamedList {
    pub(super) key: &'static str,
    /// The key of an entry's name.
    pub(super) name: &'static str,
    /// The keys of such lists in each entry, and of the names in those.
    pub(super) parts: Vec<(&'static str, &'static str)>,
}

#[derive(Clone, Debug)]
struct SourceFile {
    path: PathBuf,
    text: String,
    /// Offset of this text in the concatenation of all texts, which spans refer to.
    at: usize,
}

impl Sources {
    /// Reads a file and the files that it includes. `named` are the lists of tables whose entries
    /// have names.
    ///
    /// # Errors
    /// If a file cannot be read, or its `include` is invalid.
    pub(super) fn read(path: &Path, named: Vec<NamedList>) -> Result<Sources, Failure> {
        let mut budget = MAX_LEN;
        let text = read_text(path, &mut budget).map_err(|reason| {
            Failure::request(format!("cannot read config file {}: {reason}; check its path", path.display()))
        })?;
        let mut sources = Sources::of_text(path, text).with_named(named);
        for (span, directory) in sources.includes()? {
            let wrong = |what: String| sources.wrong(Some(span.clone()), &format!("include: {what}"));
            let directory = path.parent().unwrap_or(Path::new("")).join(directory);
            let files = toml_files(&directory).map_err(|error| {
                wrong(format!("{}: {error}; name a directory, or remove it", directory.display()))
            })?;
            if sources.files.len() + files.len() > MAX_FILES {
                return Err(wrong(format!("there are more than {MAX_FILES} files; merge some")));
            }
            let mut texts = Vec::new();
            for file in files {
                let text = read_text(&file, &mut budget);
                let text = text.map_err(|reason| wrong(format!("{}: {reason}", file.display())))?;
                texts.push((file, text));
            }
            texts.into_iter().for_each(|(file, text)| sources.push(file, text));
        }
        Ok(sources)
    }

    /// Sources of a single file with the given text.
    pub(super) fn of_text(path: &Path, text: String) -> Sources {
        let mut sources = Sources { files: Vec::new(), named: Vec::new(), is_generated: false };
        sources.push(path.to_owned(), text);
        sources
    }

    /// These files with other texts, in the order of [`Sources::files`].
    pub(super) fn with_texts(&self, texts: impl Iterator<Item = String>) -> Sources {
        let mut edited = Sources { files: Vec::new(), named: self.named.clone(), ..*self };
        self.files.iter().zip(texts).for_each(|(file, text)| edited.push(file.path.clone(), text));
        edited
    }

    /// Sets the lists of tables whose entries have names.
    pub(super) fn with_named(self, named: Vec<NamedList>) -> Sources {
        Sources { named, ..self }
    }

    /// Marks the text as generated: messages name no file and line.
    pub(super) fn generated(self) -> Sources {
        Sources { is_generated: true, ..self }
    }

    fn push(&mut self, path: PathBuf, text: String) {
        let at = self.files.last().map_or(0, |last| last.at + last.text.len() + 1);
        self.files.push(SourceFile { path, text, at });
    }

    /// The path of the main file.
    pub(super) fn path(&self) -> &Path {
        self.files.first().map_or(Path::new(""), |file| &file.path)
    }

    /// The paths and texts of all files, the main one first.
    pub(super) fn files(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.files.iter().map(|file| (file.path.as_path(), file.text.as_str()))
    }

    /// Whether the main file includes others.
    pub(super) fn has_include(&self) -> bool {
        self.includes().is_ok_and(|all| !all.is_empty())
    }

    /// The directories that the main file includes, each with the span of its name.
    fn includes(&self) -> Result<Vec<(Range<usize>, String)>, Failure> {
        let Some(main) = self.files.first() else { return Ok(Vec::new()) };
        let mut table = main.parse().map_err(|error| self.wrong_toml(&error))?.into_inner();
        let Some((_, value)) = table.remove_entry(INCLUDE) else { return Ok(Vec::new()) };
        let span = value.span();
        let list = match value.get_ref() {
            DeValue::String(directory) => vec![(span, directory.to_string())],
            _ => {
                let list = Vec::<Spanned<String>>::deserialize(ValueDeserializer::from(value));
                let list = list.map_err(|_| {
                    self.wrong(Some(span), "include: write a directory, as include = \"conf.d\"")
                })?;
                list.into_iter().map(|item| (item.span(), item.into_inner())).collect()
            }
        };
        Ok(list)
    }

    /// The merged keys of all files, without `include`.
    ///
    /// # Errors
    /// If a file is not TOML, or a single value is given in two files.
    pub(super) fn table(&self) -> Result<Spanned<DeTable<'_>>, Failure> {
        let (mut all, mut whole) = (DeTable::new(), 0..0);
        for (nth, file) in self.files.iter().enumerate() {
            let parsed = file.parse().map_err(|error| self.wrong_toml_in(file, &error))?;
            if nth == 0 {
                whole = parsed.span();
            }
            let mut table = shifted(parsed.into_inner(), file.at);
            if let Some((key, _)) = table.remove_entry(INCLUDE).filter(|_| nth > 0) {
                let what =
                    "include: an included file cannot include others; name the directory in the main file";
                return Err(self.wrong(Some(key.span()), what));
            }
            for (key, value) in table {
                self.merge(&mut all, key, value)?;
            }
        }
        Ok(Spanned::new(whole, all))
    }

    fn merge<'i>(
        &self,
        all: &mut DeTable<'i>,
        key: Spanned<Cow<'i, str>>,
        mut value: Spanned<DeValue<'i>>,
    ) -> Result<(), Failure> {
        let Some((_, first)) = all.get_key_value(&**key.get_ref()) else {
            all.insert(key, value);
            return Ok(());
        };
        let place = self.place(first.span().start);
        let name = key.get_ref().to_string();
        match (all.get_mut(&*name).map(Spanned::get_mut), value.get_mut()) {
            (Some(DeValue::Array(own)), DeValue::Array(more)) => {
                more.iter_mut().for_each(|item| own.push(take(item)));
                Ok(())
            }
            _ => {
                let what = format!("key `{name}` is also given in {place}; remove one");
                Err(self.wrong(Some(key.span()), &what))
            }
        }
    }

    /// Checks that no two entries of a list have the same name, of the merged keys of all files.
    ///
    /// # Errors
    /// Names both entries.
    pub(super) fn check_names(&self, table: &DeTable<'_>) -> Result<(), Failure> {
        for list in &self.named {
            let Some(DeValue::Array(entries)) = table.get(list.key).map(Spanned::get_ref) else { continue };
            self.check_names_in(entries, (list.key, list.name), "")?;
            for entry in entries.iter() {
                let owner = name_in(entry, list.name).map_or_else(String::new, |name| name.to_string());
                let owner = format!("{} `{owner}`: ", list.key);
                for (part, name) in &list.parts {
                    if let Some(DeValue::Array(entries)) = entry.get_ref().get(*part).map(Spanned::get_ref) {
                        self.check_names_in(entries, (part, name), &owner)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn check_names_in(
        &self,
        list: &DeArray<'_>,
        (key, name): (&str, &str),
        owner: &str,
    ) -> Result<(), Failure> {
        let mut seen = HashMap::new();
        for (nth, entry) in list.iter().enumerate() {
            let Some(own) = name_in(entry, name) else { continue };
            if let Some((before, at)) = seen.insert(own.clone(), (nth + 1, entry.span().start)) {
                let both = match self.is_generated {
                    true => format!("entries {before} and {} of the list have this name", nth + 1),
                    false => format!("is also given in {}", self.place(at)),
                };
                let what = format!("{owner}{key} `{own}`: {both}; remove one, or merge the two");
                return Err(self.wrong(Some(entry.span()), &what));
            }
        }
        Ok(())
    }

    /// A failure at a span, with its file and line, and with its key if the value is invalid.
    pub(super) fn wrong(&self, span: Option<Range<usize>>, what: &str) -> Failure {
        let start = span.map_or(0, |span| span.start);
        let Some((file, before)) = self.before(start) else { return Failure::request(what) };
        let line = before.matches('\n').count() + 1;
        let header = file.text.get(before.len()..).and_then(header_of_one_table);
        let what = match header.filter(|_| what.contains(ONE_TABLE_FOR_A_LIST)) {
            Some(key) => format!("[{key}] is one table, and `{key}` is a list; write [[{key}]]"),
            None => plain_message(what),
        };
        let is_about_value = ["invalid ", "unknown value "].iter().any(|begin| what.starts_with(begin));
        let key = key_before(before).filter(|_| is_about_value);
        let key = key.map(|key| format!("{key}: ")).unwrap_or_default();
        if self.is_generated {
            return Failure::request(format!("{key}{what}"));
        }
        Failure::request(format!("{}:{line}: {key}{what}", file.path.display()))
    }

    fn wrong_toml(&self, error: &toml::de::Error) -> Failure {
        self.wrong(error.span(), error.message())
    }

    fn wrong_toml_in(&self, file: &SourceFile, error: &toml::de::Error) -> Failure {
        let span = error.span().map(|span| span.start + file.at..span.end + file.at);
        self.wrong(span, error.message())
    }

    /// The file and line of an offset, as `FILE:LINE`.
    fn place(&self, at: usize) -> String {
        let line = |(file, before): (&SourceFile, &str)| {
            format!("{}:{}", file.path.display(), before.matches('\n').count() + 1)
        };
        self.before(at).map(line).unwrap_or_default()
    }

    /// The file of an offset, and the text before the offset in that file.
    fn before(&self, at: usize) -> Option<(&SourceFile, &str)> {
        let file = self.files.iter().rev().find(|file| file.at <= at)?;
        Some((file, file.text.get(..at - file.at).unwrap_or(&file.text)))
    }

    /// Prefixes a message with the file and line of the key that it is about. This is the entry
    /// that the message names, as in `` iscsi_target `iqn.a` ``, and the key of that entry if the
    /// message names one. A message that names nothing of these files is returned unchanged.
    pub(super) fn located(&self, failure: Failure) -> Failure {
        let what = failure.to_string();
        if self.is_generated {
            return failure;
        }
        match self.table().ok().and_then(|table| self.subject(table.get_ref(), &what)) {
            Some(at) => Failure::request(format!("{}: {what}", self.place(at))),
            None => failure,
        }
    }

    fn subject(&self, table: &DeTable<'_>, what: &str) -> Option<usize> {
        let names: Vec<&str> = what.split('`').skip(1).step_by(2).collect();
        let of_list = |NamedList { key, name, .. }: &NamedList| {
            let DeValue::Array(entries) = table.get(*key)?.get_ref() else { return None };
            // Prefer an entry whose list is also named, then a target to a volume: messages about
            // targets name their volumes.
            let order = (!has_word(what, key), *key == VOLUMES.0);
            let entry = entries.iter().find(|entry| {
                let name = entry.get_ref().get(*name).and_then(|name| name.get_ref().as_str());
                name.is_some_and(|name| names.contains(&name))
            })?;
            Some((order, entry))
        };
        let mut found: Vec<_> = self.named.iter().filter_map(of_list).collect();
        found.sort_by_key(|(order, _)| *order);
        if let Some((_, entry)) = found.first() {
            return Some(key_in(entry, what).unwrap_or(entry.span().start));
        }
        if let Some(at) = table.values().find_map(|value| file_in(value, what)) {
            return Some(at);
        }
        // The subject comes first in a message.
        let place = |key: &str| word_at(what, key).or_else(|| begins_with_option(what, key).then_some(0));
        let keys = table.keys().filter_map(|key| Some((place(key.get_ref())?, key.span().start)));
        keys.min().map(|(_, start)| start)
    }
}

impl SourceFile {
    fn parse(&self) -> Result<Spanned<DeTable<'_>>, toml::de::Error> {
        DeTable::parse(&self.text)
    }
}

/// The name of an entry. A number is no text, however the two are written.
#[derive(Clone, PartialEq, Eq, Hash)]
enum EntryName {
    Text(String),
    Number(i64),
}

impl fmt::Display for EntryName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EntryName::Text(name) => f.write_str(name),
            EntryName::Number(number) => number.fmt(f),
        }
    }
}

/// The name of an entry; `None` also for a number that no key can have.
fn name_in(entry: &Spanned<DeValue<'_>>, key: &str) -> Option<EntryName> {
    match entry.get_ref().get(key)?.get_ref() {
        DeValue::String(name) => Some(EntryName::Text(name.to_string())),
        DeValue::Integer(number) => {
            i64::from_str_radix(number.as_str(), number.radix()).ok().map(EntryName::Number)
        }
        _ => None,
    }
}

/// The offset of the longest key below `value` that the message names.
fn key_in(value: &Spanned<DeValue<'_>>, what: &str) -> Option<usize> {
    let mut found = Vec::new();
    collect_keys(value, what, &mut found);
    found.into_iter().max_by_key(|(len, _)| *len).map(|(_, at)| at)
}

fn collect_keys(value: &Spanned<DeValue<'_>>, what: &str, found: &mut Vec<(usize, usize)>) {
    match value.get_ref() {
        DeValue::Table(table) => {
            for (key, value) in table {
                if has_word(what, key.get_ref()) {
                    found.push((key.get_ref().len(), key.span().start));
                }
                collect_keys(value, what, found);
            }
        }
        DeValue::Array(items) => items.iter().for_each(|item| collect_keys(item, what, found)),
        _ => {}
    }
}

/// The offset of a key such as `secret_file` below `value` whose path the message contains.
fn file_in(value: &Spanned<DeValue<'_>>, what: &str) -> Option<usize> {
    match value.get_ref() {
        DeValue::Table(table) => table.iter().find_map(|(key, value)| {
            let is_file = key.get_ref().ends_with("_file");
            let path = value.get_ref().as_str().filter(|path| is_file && what.contains(path));
            path.map(|_| key.span().start).or_else(|| file_in(value, what))
        }),
        DeValue::Array(items) => items.iter().find_map(|item| file_in(item, what)),
        _ => None,
    }
}

/// Whether the text contains the word as a whole word.
fn has_word(text: &str, word: &str) -> bool {
    word_at(text, word).is_some()
}

/// Whether a message begins with the option of this key, as `--api: ...` for `api`.
fn begins_with_option(what: &str, key: &str) -> bool {
    let rest = what.strip_prefix("--").and_then(|what| what.strip_prefix(&*key.replace('_', "-")));
    rest.is_some_and(|rest| rest.starts_with([':', ' ']))
}

/// The offset of the first occurrence of the word as a whole word.
fn word_at(text: &str, word: &str) -> Option<usize> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let is_whole =
        |at: &usize| !text[..*at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part);
    text.match_indices(word).map(|(at, _)| at).find(is_whole)
}

/// The table with all spans shifted by `by`.
fn shifted(table: DeTable<'_>, by: usize) -> DeTable<'_> {
    let mut all = DeTable::new();
    for (key, mut value) in table {
        shift_value(&mut value, by);
        let span = key.span();
        all.insert(Spanned::new(span.start + by..span.end + by, key.into_inner()), value);
    }
    all
}

fn shift_value(item: &mut Spanned<DeValue<'_>>, by: usize) {
    let span = item.span();
    let mut value = take(item).into_inner();
    match &mut value {
        DeValue::Array(items) => items.iter_mut().for_each(|item| shift_value(item, by)),
        DeValue::Table(table) => *table = shifted(std::mem::take(table), by),
        _ => {}
    }
    *item = Spanned::new(span.start + by..span.end + by, value);
}

fn take<'i>(item: &mut Spanned<DeValue<'i>>) -> Spanned<DeValue<'i>> {
    let span = item.span();
    std::mem::replace(item, Spanned::new(span, DeValue::Array(DeArray::new())))
}

/// Reads a text file of at most `budget` bytes, and subtracts its length from `budget`.
fn read_text(path: &Path, budget: &mut u64) -> Result<String, String> {
    let mut text = String::new();
    let file = regular::open(path).map_err(|error| error.to_string())?;
    // The limit also ends the read of an endless file.
    file.take(*budget + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    let left = budget.checked_sub(text.len() as u64);
    *budget = left.ok_or_else(|| format!("all files together are longer than {}", human_size(MAX_LEN)))?;
    Ok(text)
}

/// The files of a directory whose names end in `.toml`, in the order of their names.
fn toml_files(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path()));
    let mut files = BTreeMap::new();
    for path in entries.collect::<Result<Vec<_>, _>>()? {
        let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !is_hidden && path.extension().is_some_and(|extension| extension == "toml") {
            files.insert(path.file_name().map(std::ffi::OsStr::to_owned), path);
        }
    }
    Ok(files.into_values().collect())
}

/// The key in the header of one table, as of `[volume]`, at the beginning of a text. Lists of
/// addresses have none.
fn header_of_one_table(text: &str) -> Option<&str> {
    let (key, _) = text.strip_prefix('[')?.split_once(']')?;
    (!key.starts_with('[') && by_name(&key.replace('_', "-")).is_none()).then_some(key)
}

/// Replaces serde's terms in a message of the TOML reader by those of config files.
fn plain_message(what: &str) -> String {
    let what = what
        .replace("unknown field", "unknown key")
        .replace("missing field", "missing key")
        .replace("unknown variant", "unknown value")
        .replace("a nonzero usize", "a number of at least 1")
        .replace("expected a sequence", A_LIST)
        .replace("expected a map", A_TABLE);
    shortened(&what)
}

/// Shortens a message about an unknown key: a similar key replaces the list of known keys, and a
/// list of more than [`MAX_LISTED_KEYS`] is replaced by the page that describes them.
fn shortened(what: &str) -> String {
    let unknown = what.strip_prefix("unknown key `").and_then(|rest| rest.split_once("`, expected "));
    let Some((key, known)) = unknown else { return what.to_owned() };
    let known: Vec<_> = known.split('`').skip(1).step_by(2).collect();
    match nearest(key, &known) {
        Some(meant) => format!("unknown key `{key}`, did you mean `{meant}`?"),
        None if known.len() > MAX_LISTED_KEYS => {
            format!("unknown key `{key}`; remove it, {REFERENCE_PAGE} lists the keys")
        }
        None => what.to_owned(),
    }
}

/// The key whose value contains the end of this text.
fn key_before(text: &str) -> Option<&str> {
    let (left, value) = text.rsplit_once('=')?;
    let is_value = value.lines().all(|line| !line.trim_start().starts_with("[["));
    let left = left.trim_end();
    // A quoted key, such as an address, may contain any character.
    let quoted = left.strip_suffix(['"', '\'']).and_then(|key| Some(key.rsplit_once(['"', '\''])?.1));
    let is_of_a_key = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let key = quoted.or_else(|| left.rsplit(|c| !is_of_a_key(c)).next())?;
    (is_value && !key.is_empty()).then_some(key)
}

/// The key that names directories of further files.
pub(super) const INCLUDE: &str = "include";
/// Maximum length of all files together, in bytes: tens of thousands of volumes.
const MAX_LEN: u64 = 4 << 20;
/// Maximum number of files, including the main file.
const MAX_FILES: usize = 1024;
/// Maximum number of keys that a message lists.
const MAX_LISTED_KEYS: usize = 10;
/// The page that describes all keys, as messages name it.
pub(super) const REFERENCE_PAGE: &str = "docs/reference/config.md";
/// serde's words for one table in place of a list.
const ONE_TABLE_FOR_A_LIST: &str = "invalid type: map, expected a sequence";
/// Replacements of serde's "map" and "sequence", with examples: the usual cause is a missing pair
/// of brackets.
const A_TABLE: &str = "expected a table, such as { 0 = \"disk0\" }";
const A_LIST: &str = "expected a list, such as nbd = [\":10809\"] or [[volume]]";

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        directory
    }

    fn read(files: &[(&str, &str)]) -> Result<(Vec<String>, Vec<String>), String> {
        let directory = directory(files);
        let below = |text: String| text.replace(&format!("{}/", directory.path().display()), "");
        let sources = Sources::read(&directory.path().join("b.toml"), Vec::new());
        let sources = sources.map_err(|failure| below(failure.to_string()))?;
        let table = sources.table().map_err(|failure| below(failure.to_string()))?.into_inner();
        let list = |key: &str| {
            let items = table
                .get(key)
                .and_then(|value| value.get_ref().as_array())
                .into_iter()
                .flat_map(|a| a.iter());
            items.map(|item| {
                (item.get_ref().as_str().unwrap().to_owned(), below(sources.place(item.span().start)))
            })
        };
        Ok(list("nbd").unzip())
    }

    #[test]
    fn files_of_a_directory_are_read_in_order_and_lists_are_concatenated() {
        let files = [
            ("b.toml", "include = 'conf.d'\nnbd = [':1']\ncores = 1"),
            ("conf.d/20.toml", "# the last\nnbd = [\n':3',\n]"),
            ("conf.d/10.toml", "nbd = [':2']"),
            ("conf.d/.hidden.toml", "nbd = [':4']"),
            ("conf.d/10.toml.bak", "nbd = [':5']"),
        ];
        let (values, places) = read(&files).unwrap();
        assert_eq!(values, [":1", ":2", ":3"]);
        assert_eq!(places, ["b.toml:2", "conf.d/10.toml:1", "conf.d/20.toml:3"]);
    }

    #[test]
    fn an_error_in_an_included_file_names_that_file() {
        for (files, expected) in [
            (&[("b.toml", "include = 'x'")][..], "b.toml:1: include: x: "),
            (&[("b.toml", "\ninclude = 7")], "b.toml:2: include: write a directory, as include = \"conf.d\""),
            (
                &[("b.toml", "include = ['d']\ncores = 1"), ("d/a.toml", "\ncores = 2")],
                "d/a.toml:2: key `cores` is also given in b.toml:2; remove one",
            ),
            (
                &[("b.toml", "include = ['d']"), ("d/a.toml", "include = 'e'")],
                "d/a.toml:1: include: an included file cannot include others",
            ),
            (&[("b.toml", "include = 'd'"), ("d/a.toml", "\n\nnbd = [")], "d/a.toml:3: "),
        ] {
            let said = read(files).unwrap_err();
            assert!(said.starts_with(expected), "{said}");
        }
    }

    #[test]
    fn a_message_gets_the_line_of_the_entry_and_the_key_that_it_names() {
        let text = "iscsi = [':1']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n[[iscsi_target]]\nTargetName = 'iqn.b'\n\
                    luns = { 0 = 'a' }\n[[iscsi_target]]\nTargetName = 'iqn.a'\nluns = { 0 = 'x' }\nMaxBurstLength = 1\n\
                    [[iscsi_target.acl]]\nCHAP_N = 'u'\n";
        let list = |key, name| NamedList { key, name, parts: Vec::new() };
        let named = vec![list("volume", "name"), list("iscsi_target", "TargetName")];
        let sources = Sources::of_text(Path::new("b.toml"), text.to_owned()).with_named(named);
        for (what, line) in [
            ("iscsi_target `iqn.a`: MaxBurstLength 1 is out of range", Some(11)),
            ("iscsi_target `iqn.a`: no volume has the name `a`; add it, or correct `luns`", Some(10)),
            ("iscsi_target `iqn.a`: CHAP_N and secret_file belong together; set both", Some(13)),
            ("iscsi_target `iqn.a`: is wrong", Some(8)),
            ("volume `a`: iscsi_target `iqn.b` has it", Some(5)),
            ("the description of `a` is too long", Some(2)),
            ("iscsi at 127.0.0.1:1: exports no volume", Some(1)),
            ("--state: no such directory", None),
        ] {
            let said = sources.located(Failure::request(what)).to_string();
            let expected = line.map_or(what.to_owned(), |line| format!("b.toml:{line}: {what}"));
            assert_eq!(said, expected);
        }
    }

    #[test]
    fn two_entries_with_one_name_are_refused_with_both_places() {
        let named = || {
            let parts = vec![("acl", "InitiatorName"), ("namespace", "nsid")];
            let list = |key, name, parts| NamedList { key, name, parts };
            vec![list("volume", "name", Vec::new()), list("iscsi_target", "TargetName", parts)]
        };
        let said = |text: &str, is_generated| {
            let sources = Sources::of_text(Path::new("b.toml"), text.to_owned()).with_named(named());
            let sources = if is_generated { sources.generated() } else { sources };
            let table = sources.table().unwrap();
            sources.check_names(table.get_ref()).map_err(|failure| failure.to_string())
        };
        let volumes = "[[volume]]\nname = 'a'\n[[volume]]\nname = 'b'\n[[volume]]\n[[volume]]\n";
        assert_eq!(said(volumes, false), Ok(()), "volumes without a name get one");
        let twice = format!("{volumes}[[volume]]\nname = 'a'\n");
        let expected = "b.toml:7: volume `a`: is also given in b.toml:1; remove one, or merge the two";
        assert_eq!(said(&twice, false).unwrap_err(), expected);
        let expected = "volume `a`: entries 1 and 5 of the list have this name; remove one, or merge the two";
        assert_eq!(said(&twice, true).unwrap_err(), expected);
        let target = |name: &str| format!("[[iscsi_target]]\nTargetName = '{name}'\n");
        let acl = "[[iscsi_target.acl]]\nInitiatorName = 'i'\n";
        assert_eq!(said(&[&target("a"), acl, &target("b"), acl].concat(), false), Ok(()));
        let within = said(&[&target("a"), acl, acl].concat(), false).unwrap_err();
        assert!(
            within.starts_with("b.toml:5: iscsi_target `a`: acl `i`: is also given in b.toml:3; "),
            "{within}"
        );
        let numbers = |numbers: [&str; 2]| {
            let part = |number: &str| format!("[[iscsi_target.namespace]]\nnsid = {number}\n");
            said(&[target("a"), part(numbers[0]), part(numbers[1])].concat(), false)
        };
        for same in [["1", "1"], ["16", "0x10"], ["0o20", "0b1_0000"], ["+1", "1"]] {
            let refused = numbers(same).unwrap_err();
            let name = if same.contains(&"1") { 1 } else { 16 };
            let expected = format!("iscsi_target `a`: namespace `{name}`: is also given in b.toml:3");
            assert!(refused.contains(&expected), "{refused}");
        }
        for different in [["10", "0x10"], ["1", "'1'"], ["-1", "1"]] {
            assert_eq!(numbers(different), Ok(()), "{different:?}");
        }
    }
}
