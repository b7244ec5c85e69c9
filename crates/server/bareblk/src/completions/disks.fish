
# Completes disk names by asking the server.
function __bareblk_disks
    set -l words (commandline -opc)
    set -l control
    if set -l at (contains -i -- --control $words)
        set control --control $words[(math $at + 1)]
    end
    bareblk ctl names $control 2>/dev/null
end
complete -c bareblk -n "__fish_seen_subcommand_from ctl; and __fish_seen_subcommand_from attach commit flush job pause placement reclaim remove resize resume show stats stream" -f -a "(__bareblk_disks)"
