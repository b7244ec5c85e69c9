//! The codes of the front-end's requests, for programs that send arbitrary codes.
//!
//! Programs that handle requests match on `vhost::vhost_user::message::FrontendReq`, which has the same codes.

use vhost::vhost_user::message::FrontendReq;

macro_rules! numbers {
    ($($name:ident)*) => {
        $(#[doc = concat!("`VHOST_USER_", stringify!($name), "`")]
        pub const $name: u32 = FrontendReq::$name as u32;)*
    };
}

numbers! {
    GET_FEATURES SET_FEATURES SET_OWNER RESET_OWNER SET_MEM_TABLE SET_LOG_BASE SET_LOG_FD SET_VRING_NUM SET_VRING_ADDR
    SET_VRING_BASE GET_VRING_BASE SET_VRING_KICK SET_VRING_CALL SET_VRING_ERR GET_PROTOCOL_FEATURES
    SET_PROTOCOL_FEATURES GET_QUEUE_NUM SET_VRING_ENABLE NET_SET_MTU SET_BACKEND_REQ_FD GET_CONFIG SET_CONFIG
    POSTCOPY_ADVISE GET_INFLIGHT_FD SET_INFLIGHT_FD RESET_DEVICE GET_MAX_MEM_SLOTS ADD_MEM_REG REM_MEM_REG
}
