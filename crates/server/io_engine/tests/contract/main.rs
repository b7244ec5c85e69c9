//! One contract suite for every engine on every kind of storage.
#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    clippy::expect_used
)]

mod bed;

mod beds;

mod cases;

mod chance;

mod doubles;

mod faults;

mod kernel;

mod mapped;

mod mapped_writes;

mod nbd;

mod rbd;

mod turns;
mod windows;

macro_rules! suite {
    (@beds [$($bed:ident),*] $cases:tt) => {
        $( suite!(@cases $bed $cases); )*
    };
    (@cases $bed:ident [$($case:ident,)*]) => {
        mod $bed {
            $(
                #[test]
                fn $case() {
                    if let Some(bed) = crate::beds::$bed() {
                        crate::cases::$case(bed);
                    }
                }
            )*
        }
    };
}

suite!(@beds
    [uring_direct, uring_buffered, uring_tmpfs, uring_loop_device, uring_before_6_1, uring_before_5_19, uring_5_15, fake, fake_direct,
     uring_sqpoll, uring_iopoll, uring_two_rings, uring_pinned, uring_all_options,
     linux_aio_direct, linux_aio_tmpfs, linux_aio_loop_device, posix_aio_direct, posix_aio_buffered, posix_aio_tmpfs, posix_aio_loop_device, posix_aio_without_fd_pool, threads_direct, threads_buffered, threads_tmpfs, threads_loop_device, threads_one_thread, sync_direct, sync_buffered, sync_tmpfs, sync_loop_device, mmap_tmpfs, mmap_tmpfs_direct,
     remote]
    [
        written_data_is_read_back,
        last_block_is_written_and_read,
        each_of_many_ops_completes_once_with_its_own_data,
        one_two_and_1022_pieces_keep_their_order,
        more_pieces_than_the_kernel_takes_go_in_several_calls,
        empty_op_completes,
        full_queue_gives_the_op_back,
        misaligned_buffers_are_bounced_where_the_file_wants_alignment,
        misaligned_request_larger_than_a_bounce_buffer_goes_in_chunks,
        more_misaligned_requests_than_bounce_buffers_all_complete,
        flush_goes_to_the_kernel_after_the_writes_it_covers,
        durable_write_carries_dsync_or_is_synced_and_a_cached_one_does_neither,
        bounced_durable_write_is_durable_in_every_chunk,
        durable_discard_is_followed_by_a_flush,
        discarded_blocks_are_freed_and_read_as_zeroes,
        zeroes_with_unmap_read_as_zeroes,
        zeroes_without_unmap_keep_the_blocks,
        buffers_come_back_and_dropping_them_releases_the_memory,
        dropping_the_engine_with_ops_in_flight_releases_the_memory,
        cancelled_ops_all_complete,
        second_file_is_independent_and_its_place_is_used_again,
        detached_file_is_let_go,
        kick_wakes_a_sleeping_worker,
        every_later_kick_is_seen_although_the_fd_is_never_read,
        kick_before_the_watch_is_reported,
        thousands_of_kicks_merge,
        unwatched_fd_is_silent_and_its_neighbour_is_not,
        fd_that_cannot_be_watched_is_reported,
        wait_with_a_timeout_ends,
        finished_op_keeps_wait_from_sleeping,
        wait_starts_what_was_pushed,
        idle_worker_does_not_wake_up,
        stream_with_cancellations_completes_and_its_data_is_right,
    ]
);

/// The cases for layers. Omits the cases that count an op's calls, because a layer also reads its table.
mod of_layers {
    suite!(@beds
        [layer]
        [
            written_data_is_read_back,
            last_block_is_written_and_read,
            each_of_many_ops_completes_once_with_its_own_data,
            one_two_and_1022_pieces_keep_their_order,
            more_pieces_than_the_kernel_takes_go_in_several_calls,
            empty_op_completes,
            full_queue_gives_the_op_back,
            misaligned_buffers_are_bounced_where_the_file_wants_alignment,
            misaligned_request_larger_than_a_bounce_buffer_goes_in_chunks,
            more_misaligned_requests_than_bounce_buffers_all_complete,
            flush_goes_to_the_kernel_after_the_writes_it_covers,
            discarded_blocks_are_freed_and_read_as_zeroes,
            zeroes_with_unmap_read_as_zeroes,
            zeroes_without_unmap_keep_the_blocks,
            buffers_come_back_and_dropping_them_releases_the_memory,
            dropping_the_engine_with_ops_in_flight_releases_the_memory,
            cancelled_ops_all_complete,
            second_file_is_independent_and_its_place_is_used_again,
            detached_file_is_let_go,
            kick_wakes_a_sleeping_worker,
            every_later_kick_is_seen_although_the_fd_is_never_read,
            kick_before_the_watch_is_reported,
            thousands_of_kicks_merge,
            unwatched_fd_is_silent_and_its_neighbour_is_not,
            fd_that_cannot_be_watched_is_reported,
            wait_with_a_timeout_ends,
            finished_op_keeps_wait_from_sleeping,
            wait_starts_what_was_pushed,
            idle_worker_does_not_wake_up,
            stream_with_cancellations_completes_and_its_data_is_right,
        ]
    );
}

/// The cases for disks that are served only for reading.
mod of_mapped {
    suite!(@beds
        [mapped_uring, mapped_threads]
        [
            full_queue_gives_the_op_back,
            buffers_come_back_and_dropping_them_releases_the_memory,
            cancelled_ops_all_complete,
            detached_file_is_let_go,
            kick_wakes_a_sleeping_worker,
            every_later_kick_is_seen_although_the_fd_is_never_read,
            kick_before_the_watch_is_reported,
            thousands_of_kicks_merge,
            unwatched_fd_is_silent_and_its_neighbour_is_not,
            fd_that_cannot_be_watched_is_reported,
            wait_with_a_timeout_ends,
            finished_op_keeps_wait_from_sleeping,
            wait_starts_what_was_pushed,
        ]
    );
}

/// The cases for qcow2 disks that are written. Omits the cases that count calls, because the metadata thread makes some.
mod of_written_mapped {
    suite!(@beds
        [mapped_qcow2_uring, mapped_qcow2_threads, mapped_qcow2_over_a_file]
        [
            written_data_is_read_back,
            last_block_is_written_and_read,
            each_of_many_ops_completes_once_with_its_own_data,
            one_two_and_1022_pieces_keep_their_order,
            empty_op_completes,
            full_queue_gives_the_op_back,
            misaligned_buffers_are_bounced_where_the_file_wants_alignment,
            misaligned_request_larger_than_a_bounce_buffer_goes_in_chunks,
            more_misaligned_requests_than_bounce_buffers_all_complete,
            flush_goes_to_the_kernel_after_the_writes_it_covers,
            durable_write_carries_dsync_or_is_synced_and_a_cached_one_does_neither,
            discarded_blocks_are_freed_and_read_as_zeroes,
            zeroes_with_unmap_read_as_zeroes,
            zeroes_without_unmap_keep_the_blocks,
            buffers_come_back_and_dropping_them_releases_the_memory,
            dropping_the_engine_with_ops_in_flight_releases_the_memory,
            cancelled_ops_all_complete,
            second_file_is_independent_and_its_place_is_used_again,
            detached_file_is_let_go,
            kick_wakes_a_sleeping_worker,
            every_later_kick_is_seen_although_the_fd_is_never_read,
            unwatched_fd_is_silent_and_its_neighbour_is_not,
            fd_that_cannot_be_watched_is_reported,
            finished_op_keeps_wait_from_sleeping,
            wait_starts_what_was_pushed,
            idle_worker_does_not_wake_up,
            stream_with_cancellations_completes_and_its_data_is_right,
        ]
    );
}

/// The cases for files only, because a device cannot be truncated.
mod of_files {
    suite!(@beds
        [uring_direct, uring_buffered, uring_tmpfs, uring_before_6_1, uring_before_5_19, uring_5_15, fake, fake_direct,
         uring_sqpoll, uring_iopoll, uring_two_rings, uring_pinned, uring_all_options,
         linux_aio_direct, linux_aio_tmpfs, posix_aio_direct, posix_aio_buffered, posix_aio_tmpfs, posix_aio_without_fd_pool, threads_direct, threads_buffered, threads_tmpfs, threads_one_thread, sync_direct, sync_buffered, sync_tmpfs, mmap_tmpfs, mmap_tmpfs_direct]
        [reading_past_the_end_of_a_truncated_file_is_an_error,]
    );
}

/// The cases for disks on other machines. Omits the cases that count calls of the kernel, and those about files.
mod of_remote {
    suite!(@beds
        [nbd_memory, nbd_file, nbd_one_connection, nbd_without_fua, nbd_qemu, rbd]
        [
            written_data_is_read_back,
            last_block_is_written_and_read,
            each_of_many_ops_completes_once_with_its_own_data,
            one_two_and_1022_pieces_keep_their_order,
            more_pieces_than_the_kernel_takes_go_in_several_calls,
            empty_op_completes,
            full_queue_gives_the_op_back,
            durable_write_carries_dsync_or_is_synced_and_a_cached_one_does_neither,
            zeroes_with_unmap_read_as_zeroes,
            zeroes_without_unmap_keep_the_blocks,
            buffers_come_back_and_dropping_them_releases_the_memory,
            dropping_the_engine_with_ops_in_flight_releases_the_memory,
            cancelled_ops_all_complete,
            detached_file_is_let_go,
            kick_wakes_a_sleeping_worker,
            every_later_kick_is_seen_although_the_fd_is_never_read,
            kick_before_the_watch_is_reported,
            thousands_of_kicks_merge,
            unwatched_fd_is_silent_and_its_neighbour_is_not,
            fd_that_cannot_be_watched_is_reported,
            wait_with_a_timeout_ends,
            finished_op_keeps_wait_from_sleeping,
            wait_starts_what_was_pushed,
            idle_worker_does_not_wake_up,
            stream_with_cancellations_completes_and_its_data_is_right,
        ]
    );
}

/// A second file of one disk is a second connection.
mod of_several_connections {
    suite!(@beds [nbd_memory, nbd_file, rbd] [second_file_is_independent_and_its_place_is_used_again,]);
}
