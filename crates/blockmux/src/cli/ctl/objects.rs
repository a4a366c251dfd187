//! `blockmux ctl list`, `show`, `add`, `set` and `remove`: objects of the running config by their
//! place in it.

use crate::api::bodies::{AddVolume, SecretInfo, SecretText};
use crate::api::client::{Call, CallBody, segment};
use crate::api::distinct_keys;
use crate::api::edit::{
    ANY, ConfigEdit, EditOperation, EditOptions, ListQuery, ObjectItem, ObjectList, ObjectPath,
};
use crate::api::limits;
use crate::api::request::Request;
use crate::output::printable;
use crate::spec_text::SpecText;
use blockmux_volume::Limits;
use serde_json::{Map, Value};
use std::io::{Read, stdin};
use zeroize::Zeroizing;

/// The commands for objects of the config. Short forms of two of them are for volumes.
#[derive(clap::Subcommand)]
pub(super) enum ObjectCommand {
    /// List the objects of a kind, as volume or iscsi_target; without one, list the kinds
    List {
        /// Key of the config file; within a target, also its name and a key there
        #[arg(value_name = "KIND [NAME KEY]", num_args = 0..=3)]
        words: Vec<String>,
        /// Only objects whose names contain this
        #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
        filter: String,
    },
    /// Show an object of the config
    Show {
        /// Key of the config file and name; within a target, also a key and a name there
        #[arg(value_name = "KIND NAME", num_args = 2..=4, required = true)]
        words: Vec<String>,
    },
    /// Export a new volume, or add any other object to the config
    Add {
        /// Volume, as for serve; paths are those of the daemon. Or kind and name of an object, and
        /// its keys
        #[arg(value_name = "[NAME=]VOLUME | KIND NAME [KEY=VALUE]", required = true)]
        words: Vec<String>,
        #[command(flatten)]
        volume: VolumeOptions,
        #[command(flatten)]
        options: EditArgs,
    },
    /// Change keys of an object of the config
    Set {
        /// Kind and name, then keys with their new values: JSON, as KEY=["a","b"], or else a text;
        /// KEY=null removes a key
        #[arg(value_name = "KIND NAME KEY=VALUE", num_args = 2.., required = true)]
        words: Vec<String>,
        #[command(flatten)]
        options: EditArgs,
    },
    /// Stop exporting a volume, or remove any other object from the config
    Remove {
        /// Name of the volume, or kind and name of an object
        #[arg(value_name = "VOLUME | KIND NAME", num_args = 1..=4, required = true)]
        words: Vec<String>,
        #[command(flatten)]
        options: EditArgs,
    },
}

/// Options of a volume in the short form of `add`.
#[derive(clap::Args)]
pub(super) struct VolumeOptions {
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Description that discovery shows
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: String,
    /// Protocols that export it [default: all, or none if a target restricts it]
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    protocols: Option<Vec<String>>,
    /// Networks from which clients may use it, as 10.0.0.0/8 [default: all]
    #[arg(long, value_name = "NETWORK,...", value_delimiter = ',')]
    allow: Option<Vec<String>>,
    /// Limits of all clients together, as iops=500,bandwidth=10m
    #[arg(long, value_name = "KEY=N,...", value_parser = limits::parse)]
    limits: Option<Limits>,
    /// Limits of each client
    #[arg(long, value_name = "KEY=N,...", value_parser = limits::parse)]
    client_limits: Option<Limits>,
}

impl VolumeOptions {
    fn are_given(&self) -> bool {
        let VolumeOptions { read_only, description, protocols, allow, limits, client_limits } = self;
        let lists = protocols.is_some() || allow.is_some();
        *read_only || !description.is_empty() || lists || limits.is_some() || client_limits.is_some()
    }
}

/// Options of all changes of objects.
#[derive(clap::Args)]
pub(super) struct EditArgs {
    /// Only show what would change
    #[arg(long)]
    dry_run: bool,
    /// Also if sessions use what changes, whose I/O fails, or everybody gets access
    #[arg(long)]
    force: bool,
}

impl ObjectCommand {
    /// The request to the daemon.
    ///
    /// # Errors
    /// If the words are no object, or no keys with values.
    pub(super) fn request(self) -> Result<Request, String> {
        let edit = |words: &[String], operation, options: &EditArgs, if_none_match: Option<&str>| {
            let EditArgs { dry_run, force } = *options;
            let if_none_match = if_none_match.map(str::to_owned);
            let options = EditOptions { force, dry_run, if_match: None, if_none_match };
            Request::Edit(ConfigEdit { path: object_path(words), operation, options })
        };
        if let Some(request) = self.secret_request()? {
            return Ok(request);
        }
        Ok(match self {
            ObjectCommand::List { words, .. } if words.len() == 2 => {
                return Err(format!(
                    "{} {} is an object: use show, or name one of its lists",
                    words[0], words[1]
                ));
            }
            ObjectCommand::List { words, filter } => {
                let query = ListQuery { filter, ..ListQuery::default() };
                Request::List { path: object_path(&words), query }
            }
            ObjectCommand::Show { words } => Request::Show { path: object_path(&words) },
            ObjectCommand::Add { words, volume, options } => match &words[..] {
                [short] if options.dry_run => {
                    return Err(format!("{short}: --dry-run is for objects; write volume NAME spec={short}"));
                }
                [short] => volume.request(short)?,
                _ if volume.are_given() => {
                    return Err("options are for the short form of a volume; write KEY=VALUE".to_owned());
                }
                words => {
                    let (place, keys) = split(words);
                    edit(place, EditOperation::Put(object(keys)?), &options, Some(ANY))
                }
            },
            ObjectCommand::Set { words, options } => {
                let (place, keys) = split(&words);
                if keys.is_empty() {
                    return Err("write the keys to change behind the name, as KEY=VALUE".to_owned());
                }
                edit(place, EditOperation::Set(object(keys)?), &options, None)
            }
            ObjectCommand::Remove { words, options } => match &words[..] {
                [name] if options.dry_run => {
                    return Err(format!("{name}: --dry-run is for objects; write remove volume {name}"));
                }
                [name] => Request::Remove { name: name.clone(), force: options.force },
                words => edit(words, EditOperation::Remove, &options, None),
            },
        })
    }
}

impl ObjectCommand {
    /// The request about a secret, which is no part of the config and is read from standard input.
    fn secret_request(&self) -> Result<Option<Request>, String> {
        let (ObjectCommand::List { words, .. }
        | ObjectCommand::Show { words }
        | ObjectCommand::Add { words, .. }
        | ObjectCommand::Set { words, .. }
        | ObjectCommand::Remove { words, .. }) = self;
        Ok(match (self, &words[..]) {
            (ObjectCommand::List { .. }, [kind]) if kind == SECRET => Some(Request::Secrets),
            (ObjectCommand::Show { .. }, [kind, ..]) if kind == SECRET => {
                return Err("secrets are never shown; 'list secret' says what uses them".to_owned());
            }
            (ObjectCommand::Add { .. } | ObjectCommand::Set { .. }, [kind, name]) if kind == SECRET => {
                let mut value = Zeroizing::new(String::new());
                let read = stdin().take(MAX_SECRET).read_to_string(&mut value);
                read.map_err(|error| format!("standard input: {error}"))?;
                Some(Request::WriteSecret { name: name.clone(), value: SecretText(value) })
            }
            (ObjectCommand::Add { .. } | ObjectCommand::Set { .. }, [kind, _, _, ..]) if kind == SECRET => {
                return Err(
                    "a secret is read from standard input; leave it out of the command line".to_owned()
                );
            }
            (ObjectCommand::Remove { options, .. }, [kind, name]) if kind == SECRET => {
                Some(Request::RemoveSecret { name: name.clone(), force: options.force })
            }
            _ => None,
        })
    }
}

/// The kind of secrets.
const SECRET: &str = "secret";
/// More than a daemon accepts.
const MAX_SECRET: u64 = 128 << 10;

impl VolumeOptions {
    /// The request of the short form.
    fn request(self, volume: &str) -> Result<Request, String> {
        let VolumeOptions { read_only, description, protocols, allow, limits, client_limits } = self;
        let volume: SpecText = volume.parse().map_err(|error| format!("{error}"))?;
        let [limits, client_limits] = [limits, client_limits].map(|limits| limits.map(Into::into));
        Ok(Request::Add(AddVolume {
            volume,
            read_only,
            description,
            protocols,
            allow,
            limits,
            client_limits,
        }))
    }
}

/// Splits the place of an object from keys with values. The second and the fourth word are names,
/// which may have an equals sign.
fn split(words: &[String]) -> (&[String], &[String]) {
    let depth = match words {
        [_, _, part, _, ..] if !part.contains('=') => 4,
        _ => 2,
    };
    words.split_at(depth.min(words.len()))
}

/// Keys are written with underscores; hyphens do as well.
fn object_path(words: &[String]) -> ObjectPath {
    let word =
        |(nth, word): (usize, &String)| if nth % 2 == 0 { word.replace('-', "_") } else { word.clone() };
    ObjectPath(words.iter().enumerate().map(word).collect())
}

/// The object of `KEY=VALUE` words. A dot in a key leads into a table. A value is JSON, or else a
/// text. So is a number that JSON would change, as the 32 digits of an NAA designator.
fn object(words: &[String]) -> Result<Map<String, Value>, String> {
    let mut object = Map::new();
    for word in words {
        let (key, value) = word.split_once('=').ok_or_else(|| format!("`{word}`: write KEY=VALUE"))?;
        let read = serde_json::from_str(value).ok();
        let read =
            read.filter(|own: &Value| own.as_number().is_none_or(|number| number.to_string() == value));
        if read.is_some() {
            distinct_keys::check(value.as_bytes()).map_err(|twice| format!("`{key}`: {twice}"))?;
        }
        let value = read.unwrap_or_else(|| Value::from(value));
        let mut at = &mut object;
        let (above, last) = key.rsplit_once('.').map_or((None, key), |(above, last)| (Some(above), last));
        for table in above.into_iter().flat_map(|above| above.split('.')) {
            let next = at.entry(table).or_insert_with(|| Value::Object(Map::new()));
            at = next.as_object_mut().ok_or_else(|| format!("`{word}`: {table} has a value already"))?;
        }
        if at.insert(last.to_owned(), value).is_some() {
            return Err(format!("`{key}` is given twice; write it once"));
        }
    }
    Ok(object)
}

/// The path of an object, or of a list, in the API.
pub(super) fn path(ObjectPath(path): &ObjectPath) -> String {
    path.iter().fold("/v1/objects".to_owned(), |all, name| format!("{all}/{}", segment(name)))
}

pub(super) fn list_path(of: &ObjectPath, ListQuery { filter, after, .. }: &ListQuery) -> String {
    let filter = (!filter.is_empty()).then(|| format!("filter={}", segment(filter)));
    let after = after.as_ref().map(|after| format!("after={}", segment(after)));
    let query: Vec<_> = filter.into_iter().chain(after).collect();
    path(of) + if query.is_empty() { "" } else { "?" } + &query.join("&")
}

/// The HTTP request of an edit.
pub(super) fn call(edit: &ConfigEdit) -> Call {
    let ConfigEdit { path: place, operation, options } = edit;
    let (method, body) = match operation {
        EditOperation::Put(object) => ("PUT", Some(object)),
        EditOperation::Set(patch) => ("PATCH", Some(patch)),
        EditOperation::Remove => ("DELETE", None),
    };
    let if_none_match = options.if_none_match.clone().map(|tag| ("If-None-Match", tag));
    let if_match = options.if_match.clone().map(|tag| ("If-Match", tag));
    let flags = [("force=true", options.force), ("dry_run=true", options.dry_run)];
    let flags: Vec<_> = flags.into_iter().filter_map(|(flag, is_set)| is_set.then_some(flag)).collect();
    let query = if flags.is_empty() { String::new() } else { format!("?{}", flags.join("&")) };
    let mut call = Call::new(method, path(place) + &query);
    call.headers = if_none_match.into_iter().chain(if_match).collect();
    call.body = body.cloned().map(|body| CallBody::Json(Value::Object(body)));
    call
}

/// Text for people: a line for each object, with what it is about.
pub(super) fn list_text(list: &ObjectList) -> String {
    let width = list.items.iter().map(|item| item.name.chars().count()).max().unwrap_or(0);
    let line = |ObjectItem { name, object }: &ObjectItem| {
        let about = ABOUT.iter().find_map(|key| object.get(key)).map(short).unwrap_or_default();
        let line = format!("{:<width$}  {}", printable(name).to_string(), printable(&about));
        line.trim_end().to_owned()
    };
    list.items.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The keys of which the first one that an object has stands in a list.
const ABOUT: [&str; 7] = ["spec", "volume", "luns", "namespaces", "namespace", "via", "count"];

fn short(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

/// Text for people: the path of each secret, and what uses it.
pub(super) fn secrets_text(list: &[SecretInfo]) -> String {
    let line = |SecretInfo { name, path, used_by }: &SecretInfo| {
        let mut lines = vec![format!("{}  {}", printable(name), printable(path))];
        lines.extend(used_by.iter().map(|place| format!("  used by {}", printable(place))));
        lines.join("\n")
    };
    list.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Text for people: an object as in the config file.
pub(super) fn text(object: &Value) -> String {
    let text = toml::to_string(object).unwrap_or_else(|_| object.to_string());
    text.trim_end().lines().map(|line| printable(line).to_string()).collect::<Vec<_>>().join("\n")
}
