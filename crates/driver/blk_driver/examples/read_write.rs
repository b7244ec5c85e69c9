//! Writes the first 4 KiB of a vhost-user-blk disk and reads them back: `read_write SOCKET`. Overwrites them!

use std::error::Error;
use std::time::Duration;

use blk_driver::{Completion, Device, Durability, Options, Reconnect, Request, Work};

/// Time limit of each request.
const LIMIT: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args_os().nth(1).ok_or("usage: read_write SOCKET")?;
    let options = Options { reconnect: Reconnect::For(Duration::from_secs(30)), ..Options::new(socket) };
    let (device, mut queues) = Device::connect(&options)?;
    let info = device.info();
    println!("{} sectors in blocks of {} bytes", info.capacity_sectors, info.block_size_bytes);
    let queue = &mut queues[0];

    // The simple way: a slice, copied through the pool; sleeps until the data is durable.
    queue.write_blocking(0, &[7; 4096], Durability::Durable, LIMIT)?;

    // The fast way: buffers of the pool, as many requests as fit, one notification for all of them,
    // completions by token.
    let buffer = device.pool().take(4096)?;
    queue.push(&Request::new(Work::Read { sector: 0, data: &[buffer.range()] }, 1))?;
    queue.submit();
    let mut done = [Completion::default(); 8];
    let count = queue.wait(&mut done, LIMIT)?;
    for completion in &done[..count] {
        completion.result?;
        println!("request {} stored {} bytes", completion.token, completion.stored_bytes);
    }
    let mut bytes = [0; 4096];
    buffer.read(0, &mut bytes);
    println!("first byte: {}", bytes[0]);

    // Events since then: a resize, a restart of the back-end.
    while let Some(event) = device.next_event(Duration::ZERO) {
        println!("{event:?}");
    }
    Ok(())
}
