//! `bareblk top`: the rates of a running server, once per interval.
//!
//! `control socket → stats → rates against the reading before → one table per interval`

use anyhow::{Context, Result};
use bareblk::client::{Connection, StatsAnswer, Verb, rates_table};
use bareblk::command_line::{self, TopArgs};

/// Runs the command.
pub fn run(args: &TopArgs) -> Result<()> {
    let mut server = Connection::open(&args.control())?;
    let mut before = read(&mut server)?;
    let mut left = args.count;
    while left != Some(0) {
        std::thread::sleep(args.interval);
        let now = read(&mut server)?;
        command_line::print(&format!("{}\n", rates_table(&before, &now)))?;
        before = now;
        left = left.map(|count| count - 1);
    }
    Ok(())
}

fn read(server: &mut Connection) -> Result<StatsAnswer> {
    let answer = server.ask(&Verb::Stats)?.into_ok()?;
    serde_json::from_value(answer).context("cannot read the server's answer")
}
