//! The pages for users, and the code and the command lines in them.
//!
//! The unit tests of the program include this file, too: they parse the command lines.

use std::fs;
use std::iter::Peekable;
use std::path::{Path, PathBuf};
use std::str::Chars;

/// A page of the documentation.
pub(crate) struct Page {
    /// Its path from the root of the repository.
    pub(crate) name: String,
    pub(crate) text: String,
}

/// A code block of a page.
pub(crate) struct Block<'a> {
    pub(crate) language: &'a str,
    /// Its first line, from 1.
    pub(crate) line: usize,
    pub(crate) lines: Vec<&'a str>,
}

/// A command line of `blockmux`: where it is, and its words.
pub(crate) struct CommandLine {
    pub(crate) place: String,
    pub(crate) words: Vec<String>,
    /// Whether it is in a code block, complete, rather than in a sentence.
    pub(crate) is_example: bool,
}

/// The pages for users. Decisions tell what held on their day.
pub(crate) fn pages() -> Vec<Page> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut paths = ["README.md", "SECURITY.md", "CONTRIBUTING.md"].map(PathBuf::from).to_vec();
    let mut directories = vec![PathBuf::from("docs")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(root.join(&directory)).unwrap() {
            let path = directory.join(entry.unwrap().file_name());
            if root.join(&path).is_dir() && !path.ends_with("decisions") {
                directories.push(path);
            } else if path.extension().is_some_and(|end| end == "md") {
                paths.push(path);
            }
        }
    }
    paths.sort();
    let read = |path: PathBuf| Page {
        text: fs::read_to_string(root.join(&path)).unwrap(),
        name: path.display().to_string(),
    };
    paths.into_iter().map(read).collect()
}

impl Page {
    pub(crate) fn blocks(&self) -> Vec<Block<'_>> {
        let mut blocks: Vec<Block<'_>> = Vec::new();
        let mut is_inside = false;
        for (at, line) in self.text.lines().enumerate() {
            match line.trim_start().strip_prefix("```") {
                Some(language) if !is_inside => {
                    blocks.push(Block { language, line: at + 2, lines: Vec::new() });
                    is_inside = true;
                }
                Some(_) => is_inside = false,
                None if is_inside => blocks.last_mut().unwrap().lines.push(line),
                None => {}
            }
        }
        blocks
    }

    /// What stands between backquotes in sentences and tables, with its line from 1.
    pub(crate) fn spans(&self) -> Vec<(usize, String)> {
        let mut prose: Vec<&str> = self.text.lines().collect();
        for block in self.blocks() {
            prose[block.line - 2..=block.line - 1 + block.lines.len()].fill("");
        }
        let mut spans = Vec::new();
        let mut start = 0;
        for paragraph in prose.split(|line| line.is_empty()) {
            let text = paragraph.join("\n");
            let mut line = start + 1;
            for (nth, part) in text.split('`').enumerate() {
                if nth % 2 == 1 {
                    spans.push((line, part.replace('\n', " ")));
                }
                line += part.matches('\n').count();
            }
            start += paragraph.len() + 1;
        }
        spans
    }

    /// The command lines of `blockmux` in code blocks, and in sentences and tables.
    pub(crate) fn command_lines(&self) -> Vec<CommandLine> {
        let mut found = Vec::new();
        let mut add = |line: usize, text: &str, is_example: bool| {
            let lines = commands(text).into_iter().filter_map(of_blockmux).map(|words| CommandLine {
                place: format!("{}:{line}", self.name),
                words,
                is_example,
            });
            found.extend(lines);
        };
        for block in self.blocks().iter().filter(|block| ["", "text", "sh"].contains(&block.language)) {
            let mut lines = block.lines.iter().enumerate();
            while let Some((at, first)) = lines.next() {
                let mut text = (*first).to_owned();
                while text.ends_with('\\') {
                    text.pop();
                    text += lines.next().unwrap().1;
                }
                let shown = text.trim_start();
                let typed = shown.strip_prefix("$ ").or_else(|| shown.strip_prefix("# ")).unwrap_or(shown);
                if !typed.starts_with("Usage: ") {
                    add(block.line + at, typed, true);
                }
            }
        }
        for (line, text) in self.spans() {
            if text.starts_with("blockmux ") {
                add(line, &text, false);
            }
        }
        found
    }
}

/// The words of a call of `blockmux`, alone or by another program such as `podman exec`.
fn of_blockmux(words: Vec<String>) -> Option<Vec<String>> {
    let is_command = |word: &String| word.bytes().all(|byte| byte.is_ascii_lowercase());
    let at = words.iter().position(|word| word == "blockmux")?;
    // Programs of libnbd take a command in brackets.
    let end = words.iter().position(|word| word == "]").unwrap_or(words.len());
    let own = words.get(at..end)?;
    (own.get(1).is_some_and(is_command)).then(|| own.to_vec())
}

/// The commands of a shell's line as their words, without redirections and comments.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut chars = line.chars().peekable();
    let mut is_redirected = false;
    while let Some(&next) = chars.peek() {
        match next {
            '#' => break,
            '&' | ';' | '|' | '(' | ')' => commands.push(Vec::new()),
            '>' | '<' => is_redirected = true,
            _ if next.is_whitespace() => {}
            _ => {
                let word = word(&mut chars);
                if !std::mem::take(&mut is_redirected) {
                    commands.last_mut().unwrap().push(word);
                }
                continue;
            }
        }
        chars.next();
    }
    commands
}

/// The next word, without its quotes.
fn word(chars: &mut Peekable<Chars<'_>>) -> String {
    let (mut word, mut quote, mut depth) = (String::new(), None, 0);
    while let Some(&next) = chars.peek() {
        match (quote, next) {
            (Some(open), _) if next == open => quote = None,
            (None, '\'' | '"') => quote = Some(next),
            (None, '(') if word.ends_with('$') || depth > 0 => {
                depth += 1;
                word.push(next);
            }
            (None, ')') if depth > 0 => {
                depth -= 1;
                word.push(next);
            }
            (None, '&' | ';' | '|' | '(' | ')' | '>' | '<') if depth == 0 => break,
            (None, _) if next.is_whitespace() && depth == 0 => break,
            _ => word.push(next),
        }
        chars.next();
    }
    word
}
