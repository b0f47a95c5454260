//! The tests of the command, as one program.

mod action;
mod capture;
mod cli;
mod cuda;
mod emulate;
mod evolve;
mod explain;
mod folder;
mod hostile;
mod microbench;
mod plans;
mod proposers;
mod sandbox;
mod schemas;
mod source_lines;
mod sources;
mod system_calls;
mod tutorials;
mod usage;
mod worker;
