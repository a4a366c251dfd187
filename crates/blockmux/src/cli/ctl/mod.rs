//! `blockmux ctl`: controls a running daemon over its HTTP API.
//!
//! A command stands for a request (`api/request.rs`); `routes` maps requests and answers to those
//! of HTTP.

mod actions;
mod attachments;
mod cluster;
mod command;
mod fragment;
mod objects;
mod plan;
mod routes;
mod sessions;
mod snapshots;
mod status;

use self::command::CtlCommand;
use crate::access::{certificates, secret};
use crate::api::ApiAddress;
use crate::api::bodies::{AddVolume, Added, Attached, AttachedDevice, Attachment, LimitVolume, Resized};
use crate::api::client::{ApiCredentials, Client};
use crate::api::edit::{ListQuery, ObjectList, ObjectPath};
use crate::api::fragment::FragmentContent;
use crate::api::limits::LimitsBody;
use crate::api::request::{Answer, Request};
use crate::failure::Failure;
use crate::output::{both_sizes, printable, shell_word};
use crate::process::stdout::{print, print_json};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `blockmux ctl`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CtlArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: CtlCommand,
}

/// The daemon that a command is for, and the credentials for it.
#[derive(clap::Args)]
pub(crate) struct DaemonArgs {
    /// Address of `serve --control`, or of `serve --api` as http://HOST:PORT or https://HOST:PORT
    /// [default: $BLOCKMUX_CONTROL, /run/blockmux/control or $XDG_RUNTIME_DIR/blockmux/control]
    #[arg(value_name = "unix:PATH")]
    address: Option<ApiAddress>,
    /// File with the token of `serve --api`
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
    /// Directory with ca-cert.pem and, if clients need one, client-cert.pem and client-key.pem
    #[arg(long = "tls-certs", alias = "tls-certificates", value_name = "DIR", global = true)]
    tls_certificates: Option<PathBuf>,
}

/// Sends the command to the daemon and prints its answer.
pub(crate) fn run(CtlArgs { daemon, json, command }: CtlArgs) -> Result<ExitCode, Failure> {
    let client = daemon.client()?;
    if let CtlCommand::Status(status) = &command {
        return status::run(&client, status, json).map(|()| ExitCode::SUCCESS);
    }
    let compares = matches!(command, CtlCommand::Diff { exit_code: true });
    let request = &command.request(json).map_err(Failure::request)?;
    if let Request::Limit { name, limits: LimitVolume { limits: None, client_limits: None } } = request {
        return show_limits(&client, name, json).map(|()| ExitCode::SUCCESS);
    }
    let mut answer = match request {
        Request::List { path, query } => ask_all(&client, path, query)?,
        request => actions::ask(&client, request)?,
    };
    if let Answer::Noted { answer: own, note } = answer {
        tracing::warn!("{}", printable(&note));
        answer = *own;
    }
    let differs = compares && matches!(&answer, Answer::Plan(report) if !report.is_empty());
    show(answer, request, json)?;
    Ok(ExitCode::from(u8::from(differs)))
}

/// Asks for all objects of a list, part by part.
fn ask_all(client: &Client, path: &ObjectPath, query: &ListQuery) -> Result<Answer, Failure> {
    let mut all = ObjectList { items: Vec::new(), next: None };
    loop {
        let query = ListQuery { after: all.next.take(), ..query.clone() };
        match actions::ask(client, &Request::List { path: path.clone(), query })? {
            Answer::Objects(ObjectList { items, next }) => {
                all.items.extend(items);
                all.next = next;
            }
            answer => return Ok(answer),
        }
        if all.next.is_none() {
            return Ok(Answer::Objects(all));
        }
    }
}

/// Prints the limits of a volume.
fn show_limits(client: &Client, name: &str, json: bool) -> Result<(), Failure> {
    let Answer::Status(status) = actions::ask(client, &Request::Status)? else {
        return Err(Failure::run("unexpected answer from the daemon; it may have another version"));
    };
    let Some(volume) = status.volumes.iter().find(|volume| volume.name == name) else {
        return Err(Failure::run(format!("no volume has the name `{name}`")));
    };
    let all = [("limits", &volume.limits), ("client_limits", &volume.client_limits)];
    if json {
        return print_json(&Value::Object(
            all.map(|(key, limits)| (key.to_owned(), json!(limits))).into_iter().collect(),
        ));
    }
    let text =
        |limits: &Option<LimitsBody>| limits.as_ref().map_or_else(|| "none".to_owned(), LimitsBody::text);
    print(format_args!("all clients  {}\neach client  {}", text(&volume.limits), text(&volume.client_limits)))
}

/// Prints an answer to a request.
fn show(answer: Answer, request: &Request, is_json: bool) -> Result<(), Failure> {
    match (answer, request) {
        (Answer::Failed(error), _) => Err(error.into()),
        (answer, _) if is_json => print_json(&answer.json()),
        (Answer::Resized(Resized { size }), Request::Resize { name, .. }) => {
            print(format_args!("{name}  {}", both_sizes(size)))
        }
        (Answer::Added(added), Request::Add(AddVolume { protocols, .. })) => {
            let Added { name, urls, protocols_without_listener: without_listener } = added;
            let lines = urls.iter().map(|url| format!("\n  {}", printable(&shell_word(url))));
            print(format_args!("{}{}", printable(&name), lines.collect::<String>()))?;
            if urls.is_empty() {
                let why = why_not_exported(&name, protocols.as_deref(), &without_listener);
                why.into_iter().for_each(|why| tracing::warn!("{}", printable(&why)));
            }
            if !without_listener.is_empty() {
                let protocols = printable(&without_listener.join(", ")).to_string();
                tracing::warn!(
                    "not exported over {protocols}: the daemon has no listener for it; start the daemon with one"
                );
            }
            Ok(())
        }
        (Answer::Attached(Attached { number }), Request::Attach { target, .. }) => {
            print(format_args!("{}  {number}", printable(target)))
        }
        (Answer::DiskAttached(AttachedDevice { device }), Request::AttachDisk(Attachment { volume, .. })) => {
            print(format_args!("{}  {}", printable(&device), printable(volume)))
        }
        (Answer::Plan(report), _) => print(plan::text(&report)),
        (Answer::Config { content: FragmentContent::Toml(text), .. }, _) => print(text.trim_end()),
        (Answer::Secrets(list), _) => print(objects::secrets_text(&list)),
        (Answer::Cluster(status), _) => print(cluster::text(&status)),
        (Answer::Snapshots(list), _) => print(snapshots::text(&list)),
        (Answer::Snapshot(snapshot), _) => print(snapshots::text(&[snapshot])),
        (Answer::Objects(list), _) => print(objects::list_text(&list)),
        (Answer::Object { object, .. }, _) => print(objects::text(&object)),
        (Answer::Levels(levels), Request::Log { .. }) => {
            let lines: Vec<_> = levels.iter().map(|(area, level)| format!("{area:<10} {level}")).collect();
            print(lines.join("\n"))
        }
        (Answer::Message(text), _) => print(printable(&text)),
        (Answer::Done, _) => Ok(()),
        (Answer::Sessions(sessions), Request::Sessions) => print(sessions::text(sessions)),
        _ => Err(Failure::run("unexpected answer from the daemon; it may have another version")),
    }
}

/// Why a volume that was added with these `protocols` has no URL yet, apart from protocols
/// `without_listener`.
fn why_not_exported(name: &str, protocols: Option<&[String]>, without_listener: &[String]) -> Option<String> {
    let Some(protocols) = protocols else {
        return Some(format!(
            "{name} is not exported yet: other volumes are protected, so name its protocols, as in \
             `blockmux ctl set volume {name} 'protocols=[\"nbd\"]'`; then attach it to a target, if they have targets"
        ));
    };
    let listens = |word: &&String| !without_listener.contains(&word.replace('_', "-"));
    let listening: Vec<_> = protocols.iter().filter(listens).map(String::as_str).collect();
    match &listening[..] {
        [] => None,
        // NBD has no targets.
        ["nbd"] => Some(format!("no nbd listener exports it: their `?volumes=` lists lack `{name}`")),
        several => Some(format!(
            "{name} is not exported over {} yet: attach it to a target, or add it to the `?volumes=` list of a listener",
            several.join(", ")
        )),
    }
}

impl DaemonArgs {
    /// The daemon's address.
    ///
    /// # Errors
    /// If it is not named, and no daemon is at the usual places.
    pub(crate) fn address(&self) -> Result<ApiAddress, Failure> {
        self.address.clone().map_or_else(ApiAddress::usual, Ok).map_err(Failure::request)
    }

    /// A client of the daemon.
    ///
    /// # Errors
    /// If a file cannot be read, others can read a secret, or the token is missing.
    pub(crate) fn client(&self) -> Result<Client, Failure> {
        let DaemonArgs { token_file, tls_certificates, .. } = self;
        let address = &self.address()?;
        let token = token_file.as_deref().map(|path| secret::read("--token-file", path, secret::api_token));
        let token = token.transpose()?;
        if token.is_none() && matches!(address, ApiAddress::Http(_)) {
            if let Some(own) = address.encrypted().filter(|_| tls_certificates.is_some()) {
                return Err(Failure::request(format!("{address}: --tls-certs needs TLS; use {own}")));
            }
            return Err(Failure::request(format!(
                "{address}: the API requires a token over TCP; add --token-file with the file of \
                 `serve --api-token-file`"
            )));
        }
        let host = address.certified_host();
        if host.is_none() && tls_certificates.is_some() {
            return Err(Failure::request(format!(
                "{address}: --tls-certs has no effect here; remove it, or write https://HOST:PORT"
            )));
        }
        let certificates = host.map(|host| certificates::of_client(tls_certificates.as_deref(), host, true));
        let certificates = certificates.transpose()?;
        Ok(Client::new(address.clone(), ApiCredentials { token, certificates }))
    }
}

const EXAMPLES: &str = "\
Changes last until the daemon stops; `ctl save` writes them into its config
file. I/O on a removed volume fails, and the volume is flushed. The daemon reads
secret files, so their paths are those of the daemon.

Examples:
  blockmux serve mem:1g --control unix:/run/blockmux/control
  blockmux ctl unix:/run/blockmux/control status
  blockmux ctl unix:/run/blockmux/control resize disk0 2g
  blockmux ctl unix:/run/blockmux/control limit disk0 iops=500
  blockmux ctl unix:/run/blockmux/control add data=mem:1g --protocols nvme-tcp
  blockmux ctl unix:/run/blockmux/control list volume
  blockmux ctl unix:/run/blockmux/control set volume data description=new
  blockmux ctl unix:/run/blockmux/control attach data NQN 2
  blockmux ctl unix:/run/blockmux/control attach-disk data
  blockmux ctl unix:/run/blockmux/control ana NQN 1 inaccessible
  blockmux ctl unix:/run/blockmux/control add-host NQN HOSTNQN
  blockmux ctl unix:/run/blockmux/control alua IQN standby";
