//! `blockmux completions` and `blockmux man-pages`: generated from the command line definition.

use crate::failure::Failure;
use crate::process::stdout::print;
use clap::Command;
use clap_complete::Shell;
use std::path::PathBuf;

/// Arguments of `completions`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CompletionsArgs {
    shell: Shell,
}

/// Arguments of `man-pages`.
#[derive(clap::Args)]
pub(crate) struct ManPagesArgs {
    directory: PathBuf,
}

/// Prints the completion script of a shell.
pub(crate) fn complete(args: &CompletionsArgs, mut command: Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "blockmux", &mut script);
    print(String::from_utf8_lossy(&script).trim_end())
}

/// Writes `blockmux.1` and a page for each subcommand, such as `blockmux-ctl-resize.1`.
///
/// # Errors
/// If the directory cannot be created or written.
pub(crate) fn write_pages(args: &ManPagesArgs, command: Command) -> Result<(), Failure> {
    let directory = &args.directory;
    std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(command, directory))
        .map_err(|error| Failure::run(format!("{}: cannot write manual pages: {error}", directory.display())))
}

const EXAMPLES: &str = "\
Examples:
  blockmux completions bash > /etc/bash_completion.d/blockmux
  blockmux completions zsh > ~/.zfunc/_blockmux
  blockmux completions fish > ~/.config/fish/completions/blockmux.fish";
