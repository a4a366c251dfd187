//! Paths in specs: any bytes except NUL, with per cent encoding of the grammar's characters.

use super::SpecError;
use std::ffi::OsString;
use std::fmt::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Decodes a path.
pub(super) fn decode(text: &str) -> Result<PathBuf, SpecError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
        let (high, low) = (digit(), digit());
        match high.zip(low).map(|(high, low)| (high << 4 | low) as u8) {
            Some(byte) if byte != 0 => bytes.push(byte),
            _ => return Err(percent(text)),
        }
    }
    if bytes.contains(&0) {
        return Err(percent(text));
    }
    Ok(PathBuf::from(OsString::from_vec(bytes)))
}

/// The error of a per cent sign that encodes no byte, or the byte 0.
fn percent(text: &str) -> SpecError {
    let remedy = "write %25 for a per cent sign";
    SpecError(format!("`{text}` has a `%` without two hexadecimal digits after it: {remedy}"))
}

/// Encodes a path, so that it can occur anywhere in a spec.
pub(super) fn encode(path: &Path) -> String {
    encode_without(path, "")
}

/// Encodes a path that is the value of an option.
pub(super) fn encode_value(path: &Path) -> String {
    encode_without(path, "&")
}

/// Encodes a part of the name of an image, or a value.
pub(super) fn encode_name(name: &str) -> String {
    encode_without(Path::new(name), "&/@")
}

/// Encodes a path, also the characters `special`.
fn encode_without(path: &Path, special: &str) -> String {
    let mut text = String::new();
    let escape = |text: &mut String, byte: u8| write!(text, "%{byte:02X}").expect("a string takes all");
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        for letter in chunk.valid().chars() {
            match letter {
                '%' | '?' | ',' | '[' | ']' | ':' => escape(&mut text, letter as u8),
                '\0'..' ' | '\x7f' => escape(&mut text, letter as u8),
                _ if special.contains(letter) => escape(&mut text, letter as u8),
                _ => text.push(letter),
            }
        }
        chunk.invalid().iter().for_each(|&byte| escape(&mut text, byte));
    }
    text
}
