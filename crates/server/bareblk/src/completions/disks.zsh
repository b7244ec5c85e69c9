
# Completes disk names by asking the server.
_bareblk_disks() {
    # `words` lacks the options before a subcommand.
    local -a control disks line=(${(Q)${(z)BUFFER}})
    local at=${line[(I)--control]}
    ((at)) && control=(--control "${line[at + 1]}")
    disks=(${(f)"$(_call_program disks bareblk ctl names $control 2>/dev/null)"})
    compadd -a disks
}
