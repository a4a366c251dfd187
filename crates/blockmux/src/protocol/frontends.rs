//! The frontends of all protocols, and their listeners from the command line and the config file.

use super::frontend::{Change, Frontend, TargetTables};
use super::keys::{FilePlaces, KeyError, anchor, resolve_secrets};
use super::policy::TargetAccess;
use super::{PROTOCOLS, Protocol, with_frontend};
use crate::failure::Failure;
use crate::protocol::address::ListenerEntry;
use clap::builder::ValueParser;
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, Subcommand};
use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, Deserializer, ValueDeserializer};

/// A configured listener with its protocol.
pub(crate) type ConfiguredListener = (&'static Protocol, ListenerEntry);

/// The frontends of all protocols, and the configured listeners.
pub(crate) struct Frontends {
    all: Vec<(&'static Protocol, Box<dyn Frontend>)>,
    /// Listeners of the command line.
    by_options: Vec<ConfiguredListener>,
    /// Listeners of the config file.
    by_keys: Vec<ConfiguredListener>,
    /// The command line, from which frontends take their options.
    matches: Option<ArgMatches>,
    /// The keys of frontends in the config file, with absolute paths.
    pub(crate) written: toml::Table,
}

impl Default for Frontends {
    fn default() -> Frontends {
        let all = with_frontend().map(|protocol| (protocol, (protocol.frontend)()));
        Frontends {
            all: all.collect(),
            by_options: Vec::new(),
            by_keys: Vec::new(),
            matches: None,
            written: toml::Table::new(),
        }
    }
}

impl Frontends {
    /// New frontends with the options of the command line, without a config file.
    pub(crate) fn duplicate(&self) -> Frontends {
        let mut duplicate = Frontends { by_options: self.by_options.clone(), ..Frontends::default() };
        if let Some(matches) = &self.matches {
            // The options were valid when the command line was parsed.
            let _ = duplicate.take_options(matches);
        }
        duplicate
    }

    /// New frontends with the options of the command line, without listeners and without a config
    /// file.
    pub(crate) fn without_listeners(&self) -> Frontends {
        Frontends { by_options: Vec::new(), ..self.duplicate() }
    }

    /// The lists of targets in the config file, and the protocol of each.
    pub(crate) fn target_tables(&self) -> impl Iterator<Item = (&'static Protocol, &'static TargetTables)> {
        self.iter().flat_map(|(protocol, frontend)| {
            frontend.target_tables().iter().map(move |tables| (protocol, tables))
        })
    }

    /// All frontends, each with its protocol.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static Protocol, &dyn Frontend)> {
        self.all.iter().map(|(protocol, frontend)| (*protocol, &**frontend))
    }

    /// The frontend that serves a protocol.
    pub(crate) fn of(&self, protocol: &Protocol) -> Option<&dyn Frontend> {
        self.iter().find(|(own, _)| own.name == protocol.served_as()).map(|(_, frontend)| frontend)
    }

    /// The configured listeners, ordered by protocol; for each, those of the config file first.
    pub(crate) fn listeners(&self) -> Vec<ConfiguredListener> {
        let all = || self.by_keys.iter().chain(&self.by_options);
        let of = |protocol: &'static Protocol| all().filter(move |(own, _)| own.name == protocol.name);
        PROTOCOLS.iter().flat_map(|protocol| of(protocol)).cloned().collect()
    }

    /// Whether the config file has a listener.
    pub(crate) fn has_keys_of_listeners(&self) -> bool {
        !self.by_keys.is_empty()
    }

    /// The configured targets of all frontends, each with the name of its protocol.
    pub(crate) fn targets(&self) -> Vec<(&'static str, TargetAccess)> {
        let of_each = self.iter().flat_map(|(protocol, frontend)| {
            frontend.targets().into_iter().map(move |target| (protocol.name, target))
        });
        of_each.collect()
    }

    /// The protocols whose default exports require authentication.
    pub(crate) fn restricting_exports(&self) -> Vec<&'static str> {
        let restricting = self.iter().filter(|(_, frontend)| frontend.restricts_exports());
        restricting.map(|(protocol, _)| protocol.name).collect()
    }

    /// Checks the frontends that are served or configured against the names of all volumes.
    ///
    /// # Errors
    /// The first error of a frontend.
    pub(crate) fn check(
        &mut self,
        is_served: impl Fn(&Protocol) -> bool,
        volumes: &[&str],
    ) -> Result<(), String> {
        let meant = self
            .all
            .iter_mut()
            .filter(|(protocol, frontend)| is_served(protocol) || frontend.is_configured());
        meant.map(|(_, frontend)| frontend).try_for_each(|frontend| frontend.check(volumes))
    }

    /// All keys of the config file that belong to a protocol.
    pub(crate) fn keys(&self) -> Vec<String> {
        let listeners = PROTOCOLS.iter().map(|protocol| protocol.key());
        listeners.chain(self.all.iter().flat_map(|(_, own)| own.keys()).map(ToString::to_string)).collect()
    }

    fn take_options(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.all.iter_mut().try_for_each(|(_, frontend)| frontend.take_options(matches))
    }

    /// Takes the keys of a config file.
    ///
    /// # Errors
    /// If a key or a value is invalid.
    pub(crate) fn take_keys(
        &mut self,
        mut table: DeTable<'_>,
        FilePlaces { directory, secrets }: &FilePlaces<'_>,
    ) -> Result<(), KeyError> {
        for protocol in PROTOCOLS {
            let Some((_, value)) = table.remove_entry(protocol.key().as_str()) else { continue };
            for text in Vec::<Spanned<String>>::deserialize(ValueDeserializer::from(value))? {
                let entry = ListenerEntry::read(protocol.carrier, text.get_ref());
                let mut entry = entry.map_err(|error| KeyError::Syntax(Some(text.span()), error))?;
                entry.address.anchor(directory);
                self.by_keys.push((protocol, entry));
            }
        }
        for (_, frontend) in &mut self.all {
            let own = frontend.keys().iter().filter_map(|key| table.remove_entry(*key));
            let mut own: DeTable<'_> = own.collect();
            if !own.is_empty() {
                let plain = Deserializer::from(Spanned::new(0..0, own.clone()));
                let mut plain = toml::Table::deserialize(plain)?;
                plain.iter_mut().for_each(|(key, value)| anchor(key, value, directory));
                self.written.extend(plain);
                resolve_secrets(&mut own, *secrets)?;
                frontend.take_keys(Deserializer::from(Spanned::new(0..0, own)), directory)?;
            }
        }
        Ok(())
    }
}

impl From<toml::de::Error> for KeyError {
    fn from(error: toml::de::Error) -> KeyError {
        KeyError::Syntax(error.span(), error.message().to_owned())
    }
}

impl From<Failure> for KeyError {
    fn from(failure: Failure) -> KeyError {
        KeyError::Invalid(failure)
    }
}

impl Args for Frontends {
    fn augment_args(command: Command) -> Command {
        let listeners = PROTOCOLS.iter().map(|protocol| {
            let ([value_name, help], carrier) = (protocol.listener_help, protocol.carrier);
            let option = Arg::new(protocol.name).long(protocol.name).value_name(value_name).help(help);
            let read = move |text: &str| ListenerEntry::read(carrier, text);
            option.action(ArgAction::Append).value_parser(ValueParser::from(read))
        });
        let command = command.args(listeners);
        Frontends::default().iter().fold(command, |command, (_, frontend)| frontend.options(command))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Frontends::augment_args(command)
    }
}

impl FromArgMatches for Frontends {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Frontends, clap::Error> {
        let mut frontends = Frontends::default();
        frontends.update_from_arg_matches(matches)?;
        Ok(frontends)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for protocol in PROTOCOLS {
            let entries = matches.get_many::<ListenerEntry>(protocol.name).into_iter().flatten();
            self.by_options.extend(entries.map(|entry| (*protocol, entry.clone())));
        }
        self.take_options(matches)?;
        self.matches = Some(matches.clone());
        Ok(())
    }
}

impl Subcommand for Change {
    fn augment_subcommands(command: Command) -> Command {
        Frontends::default().iter().fold(command, |command, (_, frontend)| frontend.commands(command))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Change::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        Change::augment_subcommands(Command::new("")).find_subcommand(name).is_some()
    }
}

impl FromArgMatches for Change {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Change, clap::Error> {
        for (protocol, frontend) in Frontends::default().iter() {
            match frontend.read_command(matches) {
                Err(error) if error.kind() == ErrorKind::InvalidSubcommand => {}
                read => {
                    return read.map(|(target, what)| Change {
                        protocol: protocol.name.to_owned(),
                        target,
                        what,
                    });
                }
            }
        }
        Err(clap::Error::new(ErrorKind::InvalidSubcommand))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Change::from_arg_matches(matches)?;
        Ok(())
    }
}
